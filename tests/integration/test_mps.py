"""A private MPS daemon: started, shared, stopped by the last that leaves. Here with a made-up control program, which
does what the real one's manual says; ``-m cuda`` with the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipcsync import errors, linux
from ipcsync.mps import CONTROL, Daemon, check_broker

from ..harness import Broker, Child, Peer, wait_until
from .pipelines import Run, channel, report, stage, starts

FAKE = f"""#!{sys.executable}
# What nvidia-cuda-mps-control does, as far as it is used: -d makes it a daemon, commands come on stdin.
import os, signal, sys
pipe, log = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
name = os.path.join(pipe, "{CONTROL}.pid")
if sys.argv[1:] == ["-d"]:
    if os.environ.get("FAKE_MPS_BROKEN"):
        sys.exit("An instance of this daemon is already running")
    if os.fork():
        os._exit(0)
    os.setsid()
    for fd in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    with open(os.path.join(log, "control.log"), "w") as file:
        file.write("started")
    open(os.path.join(os.environ["FAKE_MPS_SEEN"]), "a").write("started\\n")
    with open(name + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(name + ".new", name)
    signal.pause()
try:
    pid = int(open(name).read())
except OSError:
    sys.exit("Cannot find MPS control daemon process")
for line in sys.stdin:
    if line == "quit\\n":
        os.remove(name)
        os.kill(pid, signal.SIGKILL)
        open(os.path.join(os.environ["FAKE_MPS_SEEN"]), "a").write("stopped\\n")
    elif line == "get_server_list\\n":
        print(4711)
    elif line == "get_client_list 4711\\n":
        print("31\\n32")
"""
IPCSYNC = [sys.executable, "-c", "from ipcsync.cli import main; main()"]
pytestmark = pytest.mark.leaves("mps.lock", "mps.users")


@pytest.fixture
def seen(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """The fake is on the PATH; what it did."""
    program, said = tmp_path / "bin" / CONTROL, tmp_path / "seen"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    said.touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS_SEEN", str(said))
    yield lambda: said.read_text().split()
    Daemon(runtime).stop()


def ipcsync(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*IPCSYNC, *arguments], capture_output=True, text=True, timeout=30)


def test_start_status_stop(seen: Callable[[], list[str]], runtime: Path) -> None:
    nothing = ipcsync("mps", "status")
    assert nothing.returncode == 1
    assert "ipcsync mps start" in nothing.stdout
    started = ipcsync("mps", "start")
    assert started.returncode == 0, started.stderr
    assert f"export CUDA_MPS_PIPE_DIRECTORY={runtime}/mps/pipe" in started.stdout
    assert "takes the other clients' CUDA contexts along" in started.stderr
    again = ipcsync("mps", "start")
    assert again.stdout == started.stdout, "it runs already"
    status = ipcsync("mps", "status")
    assert status.returncode == 0
    assert "clients: 31 32" in status.stdout
    assert "in use by a run: no" in status.stdout
    stopped = ipcsync("mps", "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert seen() == ["started", "stopped"]
    assert not (runtime / "mps").exists()
    assert "no MPS daemon ran" in ipcsync("mps", "stop").stdout


def _use(peer: Peer, runtime: str) -> None:
    with Daemon(Path(runtime)).used() as environment:
        peer.send(environment["CUDA_MPS_PIPE_DIRECTORY"])
        peer.recv()


def test_the_last_user_to_leave_stops_it(
    seen: Callable[[], list[str]], runtime: Path, spawn: Callable[..., Child]
) -> None:
    first, second = spawn(_use, str(runtime)), spawn(_use, str(runtime))
    assert first.recv() == second.recv() == str(runtime / "mps" / "pipe")
    refused = ipcsync("mps", "stop")
    assert refused.returncode == 1
    assert "a run uses this MPS daemon" in refused.stderr
    first.send()
    first.join()
    assert seen() == ["started"]
    second.send()
    second.join()
    assert seen() == ["started", "stopped"]


def test_a_killed_user_is_no_user_any_more(
    seen: Callable[[], list[str]], runtime: Path, spawn: Callable[..., Child]
) -> None:
    child = spawn(_use, str(runtime))
    child.recv()
    child.kill(signal.SIGKILL)
    daemon = Daemon(runtime)
    assert daemon.unused()
    with daemon.used():
        pass
    assert seen() == ["started", "stopped"]


def test_a_daemon_that_was_killed_is_started_anew(seen: Callable[[], list[str]], runtime: Path) -> None:
    daemon = Daemon(runtime)
    pid = daemon.start()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: daemon.pid() is None, "its end")
    assert daemon.start() != pid
    assert seen() == ["started", "started"]


def test_why_it_cannot_be_started_is_said(
    seen: Callable[[], list[str]], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS_BROKEN", "1")
    with pytest.raises(errors.Unsupported, match="already running"):
        Daemon(runtime).start()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(errors.Unsupported, match="NVIDIA's driver"):
        Daemon(runtime).start()


def test_a_broker_outside_of_it_is_refused(seen: Callable[[], list[str]], broker: Broker) -> None:
    daemon = Daemon(broker.runtime)
    with pytest.raises(errors.InvalidState, match="ipcsync broker --stop"):
        check_broker(broker.runtime, daemon.environment())
    broker.stop()
    broker.env = daemon.environment()
    broker.start()
    check_broker(broker.runtime, daemon.environment())


STAGES = """
import os
from ipcsync.errors import DeviceLost

def numbers(stage):
    print("pipe", os.environ["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    for n in range(5):
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n

def lose_once(stage):
    print("pipe", os.environ["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    marker = os.path.join(os.path.dirname(__file__), "lost")
    for slot in stage.input.slots():
        if not os.path.exists(marker) or stage.params.get("always"):
            open(marker, "w").close()
            raise DeviceLost("another client of the server was killed")
"""


@pytest.fixture
def start(tmp_path: Path, runtime: Path) -> Iterator[Callable[..., Run]]:
    yield from starts(tmp_path, STAGES)


def pipeline(more: str) -> str:
    return channel("c") + stage("numbers", "numbers", outputs="c") + stage("sink", "lose_once", inputs="c", more=more)


@pytest.mark.watchdog(120)
def test_a_run_that_lost_the_gpu_is_started_again_as_a_whole(
    seen: Callable[[], list[str]], start: Callable[..., Run], runtime: Path, tmp_path: Path
) -> None:
    run = start(pipeline('restart = "on-failure"'), "--mps", "--json", str(tmp_path / "report.json"))
    assert run.end() == 0, run.err
    assert "note: under MPS all of them share one server" in run.err
    assert "the whole run starts again (1 of 3)" in run.err
    assert run.err.count(f"pipe {runtime}/mps/pipe") == 4, "both workers of both runs are clients"
    assert report(tmp_path)["stages"]["sink"]["items"] == 5
    assert seen() == ["started", "stopped"]


@pytest.mark.watchdog(120)
def test_nor_one_whose_stages_are_not_to_be(seen: Callable[[], list[str]], start: Callable[..., Run]) -> None:
    run = start(pipeline(""), "--mps")
    assert run.end() == 1, run.err
    assert "DeviceLost" in run.err
    assert "starts again" not in run.err
    assert seen() == ["started", "stopped"]


@pytest.mark.cuda
@pytest.mark.watchdog(120)
def test_the_real_one(runtime: Path) -> None:
    """Two clients at once, and it is gone afterwards."""
    code = "import ipcsync; s = ipcsync.Stream('cuda'); s.synchronize(); print('ready', flush=True); input()"
    daemon = Daemon(runtime)
    with daemon.used() as environment:
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
        assert set(daemon.clients()) >= {client.pid for client in clients}
        for client in clients:
            client.communicate("\n", timeout=30)
        pid = daemon.pid()
    assert pid is not None
    assert daemon.pid() is None
    assert linux.start_time(pid) == 0, "it has ended, though nobody may have reaped it"
