"""Makes the pictures of the documentation anew, from a pipeline that really runs: ``python docs/pictures/make.py``.

Needs Chromium for the page and matplotlib for the trace: ``apt-get install chromium; pip install -e '.[plots]'``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from rich.console import Console

from ipcsync import ask, show
from ipcsync.overview import overview, rates

HERE = Path(__file__).parent
IPCSYNC = [sys.executable, "-c", "from ipcsync.cli import main; main()"]


def main() -> None:
    runtime = Path(tempfile.mkdtemp(prefix="ipcsync-pictures-", dir="/dev/shm"))
    os.environ["IPCSYNC_RUNTIME_DIR"] = str(runtime)
    port = 9464
    broker = subprocess.Popen([sys.executable, "-m", "ipcsync_broker", "--http", f"127.0.0.1:{port}"])
    try:
        wait_for(runtime, broker)
        run = subprocess.Popen([*IPCSYNC, "run", str(HERE / "pipeline.toml")], stdout=subprocess.DEVNULL)
        time.sleep(5)
        page(port)
        top(runtime)
        run.send_signal(signal.SIGINT)
        run.wait(30)
    finally:
        broker.terminate()
        broker.wait(15)
    trace()
    shutil.rmtree(runtime, ignore_errors=True)


def wait_for(runtime: Path, broker: subprocess.Popen[bytes]) -> None:
    while not (runtime / "broker.sock").exists() and broker.poll() is None:
        time.sleep(0.05)


def page(port: int) -> None:
    """The broker's page; two looks before it, a moment apart, make rates."""
    for _ in range(3):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json").close()
        time.sleep(1.1)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("this needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += [f"--user-data-dir={profile}", "--window-size=1240,860", "--virtual-time-budget=500"]
        target = f"--screenshot={HERE / 'page.png'}"
        subprocess.run([chromium, *options, target, f"http://127.0.0.1:{port}/"], check=True, stderr=subprocess.DEVNULL)


def top(runtime: Path) -> None:
    with ask.Asker(runtime) as asker:
        before, at = overview(runtime, asker.status()), time.monotonic()
        time.sleep(2)
        seen = overview(runtime, asker.status())
        per_second = rates(before, seen, time.monotonic() - at)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=150, file=nowhere)
        console.print(show.everything(seen, per_second))
    (HERE / "top.svg").write_text(console.export_svg(title="ipcsync top"))


def trace() -> None:
    """The photo pipeline with a slow stage."""
    photos = HERE.parent / "examples" / "photos" / "pipeline.toml"
    with tempfile.TemporaryDirectory() as out:
        sets = [f"stages.{stage}.params.folder={out}" for stage in ("write", "histogram")]
        sets.append("stages.edges.params.slow=0.3")
        told = [part for each in sets for part in ("--set", each)]
        subprocess.run([*IPCSYNC, "run", str(photos), "--trace", f"{out}/out.json", *told], check=True)
        subprocess.run([*IPCSYNC, "trace", "summary", f"{out}/out.json"], check=True)
        subprocess.run([*IPCSYNC, "trace", "plot", f"{out}/out.json", str(HERE / "trace.png")], check=True)


if __name__ == "__main__":
    main()
