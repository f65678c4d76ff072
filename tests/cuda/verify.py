"""A bounded run of everything that needs a GPU, as one command: ``python -m tests.cuda.verify [--mps]``.

Without MPS, pytest runs once. With ``--mps``, each xdist worker has an MPS server of its own, and every test that kills
a process is run alone, with a server of its own, since a client that dies with a kernel running takes the others of its
server along. The log (``--log FILE``) has a line for each test, written as it ends, so that it is worth reading even if
the run was broken off. docs/gpu-verification.md says how it is used.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MORE = ("test_pipeline_photos.py", "test_torch.py", "test_docs.py")
PATHS = ("tests/cuda", "tests/conformance", "tests/faults", *(f"tests/integration/{name}" for name in _MORE))
#: Less of what only takes long; what the environment says already stays.
SHORT = {"IPCSYNC_ROUNDS": "200", "IPCSYNC_CYCLES": "2000", "IPCSYNC_JOINS": "8", "IPCSYNC_FAULT_BATCH": "4"}
SHORT |= {"IPCSYNC_FAULT_CYCLES": "8", "IPCSYNC_FAULT_KILLS": "8", "IPCSYNC_FAULT_BROKER_KILLS": "3"}
_LINE = r"^(passed|failed|skipped) \S+ [\d.]+ (?:setup [\d.]+ )?(\S+\.py::\S.*)$"
KEPT = 65  # seconds kept for the tests that kill, under MPS
LONG = {"IPCSYNC_ROUNDS": "1000", "IPCSYNC_CYCLES": "25000"}


def main() -> int:
    options = _options()
    end = time.time() + options.seconds
    for name, value in (LONG if options.long else SHORT).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("IPCSYNC_REQUIRE_CUDA", "1")
    # As for workers, since tests hold streams by words; the clients of an MPS server have fewer to share.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8" if options.mps else "32")
    os.environ.setdefault("CUPY_ACCELERATORS", "")  # or each reduction of each type is compiled for seconds
    options.log.parent.mkdir(parents=True, exist_ok=True)
    os.environ["IPCSYNC_TEST_LOG"] = str(options.log)
    options.log.write_text("")
    if options.contexts and not options.mps:
        _measure(options.log)
    subprocess.run([sys.executable, "-m", "tests.cuda.warm"], check=False)
    marks = f"cuda and ({options.marks})"
    status = _under_mps(end, marks, options) if options.mps else _several(end, marks, options)
    _sum_up(options.log)
    return status


def _measure(log: Path) -> None:
    """The first lines of the log: what a context costs, which is most of what a test on a GPU costs."""
    with log.open("w") as file:
        command = [sys.executable, "-m", "tests.cuda.contexts"]
        try:
            subprocess.run(command, stdout=file, stderr=file, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            file.write("contexts: not all of it in 30 s\n")
    print(log.read_text(), end="", flush=True)


def _several(end: float, marks: str, options: argparse.Namespace) -> int:
    os.environ["IPCSYNC_TEST_UNTIL"] = str(end - 10)
    return _pytest(end, "-n", str(options.workers), "-m", marks, *_arguments(options))


def _under_mps(end: float, marks: str, options: argparse.Namespace) -> int:
    if (
        options.paths == PATHS
    ):  # faults kill in the middle of kernels, again and again: under MPS that ends the test too
        options.paths = tuple(path for path in PATHS if path != "tests/faults")
    with Servers(options.workers) as servers:
        if not servers.directories:
            print("no MPS server could be started")
            return 1
        os.environ["IPCSYNC_TEST_MPS"] = ":".join(servers.directories)
        status = _several(end - KEPT, f"{marks} and not kills", options)
        os.environ["IPCSYNC_TEST_UNTIL"] = str(end - 10)
        return _alone(servers, end, marks, options) or status


def _sum_up(log: Path) -> None:
    """What the log says, last of all: the end of a long output is what is kept of it."""
    lines = re.findall(_LINE, log.read_text(), re.MULTILINE)
    for outcome, name in lines:
        if outcome == "failed":
            print(f"failed {name}")
    counts = Counter(outcome for outcome, _ in lines)
    print(f"in all: {', '.join(f'{count} {outcome}' for outcome, count in sorted(counts.items()))}; {log} has each")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mps", action="store_true", help="under MPS, with servers of this run's own")
    parser.add_argument("--seconds", type=float, default=235, help="after which it ends (235)")
    parser.add_argument("-n", dest="workers", type=int, default=3, help="tests at once (3)")
    parser.add_argument("--no-contexts", dest="contexts", action="store_false", help="without tests.cuda.contexts")
    parser.add_argument("--long", action="store_true", help="every count as large as it was first shown with")
    parser.add_argument("--log", type=Path, default=Path(os.environ.get("OUT", "/tmp")) / "ipcsync-gpu.log")
    parser.add_argument("-m", dest="marks", default="not cuda2", help='which of the cuda tests ("not cuda2")')
    parser.add_argument("paths", nargs="*", help="which tests (all)")
    options = parser.parse_args()
    options.paths = tuple(options.paths) or PATHS
    return options


def _arguments(options: argparse.Namespace) -> list[str]:
    output = ["--durations=25", "--tb=short", f"--junitxml={options.log.with_suffix('.xml')}"]
    return ["--continue-on-collection-errors", "--maxschedchunk=2", *output, *options.paths]


#: pytest-benchmark warns where there is xdist, and a warning is an error here.
_WITHOUT = ("-p", "no:cacheprovider", "-p", "no:benchmark")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "tests.cuda.plugin", *_WITHOUT, *arguments]


def _pytest(end: float, *arguments: str) -> int:
    """Ended by SIGINT at the end of the time, so that pytest still says what it knows."""
    process = subprocess.Popen(_command(*arguments))
    try:
        return process.wait(max(1.0, end - time.time()))
    except subprocess.TimeoutExpired:
        process.send_signal(2)
        try:
            return process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


# -- MPS


class Servers:
    """MPS control daemons with directories of their own, so that no client shares a server with another worker's."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._root = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))  # a short path: it holds sockets
        self.directories: list[str] = []  # of those that clients reach

    def start(self, name: str, *probes: str) -> str | None:
        """The pipe directory of a new daemon that a client was seen to reach; None if none came up. `probes`: what else
        of ``ipcsync doctor`` must work there."""
        where = self._root / name
        where.mkdir(exist_ok=True)
        env = self._env(where)
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True, timeout=20)
            for which, wanted in (("cuda.device", "MPS is on"), *((probe, '"ok"') for probe in probes)):
                probe = [sys.executable, "-m", "ipcsync.doctor_probe", which, "0"]
                said = subprocess.run(probe, env=env, capture_output=True, text=True, timeout=30, check=False)
                if wanted not in said.stdout:
                    print(f"MPS server {name}: {said.stdout.strip() or said.stderr.strip()[-300:]}")
                    self.stop(str(where))
                    return None
            return str(where)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"MPS server {name}: {error}")
            return None

    def stop(self, directory: str) -> None:
        try:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 2\n", text=True, env=self._env(Path(directory)),
                           capture_output=True, timeout=10, check=False)  # fmt: skip
        except subprocess.TimeoutExpired:
            pass  # it ends with this machine

    @staticmethod
    def _env(where: Path) -> dict[str, str]:
        return {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(where), "CUDA_MPS_LOG_DIRECTORY": str(where)}

    def __enter__(self) -> Servers:
        with ThreadPoolExecutor(self._count) as pool:
            found = list(pool.map(lambda n: self.start(f"gw{n}", "cuda.arrays"), range(self._count)))
        self.directories = [directory for directory in found if directory is not None]
        print(f"{len(self.directories)} of {self._count} MPS servers", flush=True)
        return self

    def stop_all(self) -> None:
        with ThreadPoolExecutor(self._count) as pool:
            list(pool.map(self.stop, self.directories))

    def __exit__(self, *_: object) -> None:
        self.stop_all()
        shutil.rmtree(self._root, ignore_errors=True)


def _alone(servers: Servers, end: float, marks: str, options: argparse.Namespace) -> int:
    """The tests that kill, each in a pytest of its own with a server of its own, several of them at once."""
    command = _command("--collect-only", "-m", f"{marks} and kills", *options.paths)
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [line for line in listed.stdout.splitlines() if re.match(r"\S+\.py::", line)]
    print(f"{len(names)} tests that kill, each with a server of its own", flush=True)

    servers.stop_all()
    at_once = options.workers if len(servers.directories) > 1 else 1  # where there can be but one server: in turn

    def run(at: int) -> tuple[str, int, str]:
        if time.time() > end - 15:
            return names[at], 5, "not run: the time was up"
        directory = servers.start(f"k{at}")
        if directory is None:
            return names[at], 1, "no MPS server"
        try:
            done = subprocess.run(
                _command("--tb=short", names[at]), capture_output=True, text=True, check=False,
                env={**os.environ, "IPCSYNC_TEST_MPS": directory, "IPCSYNC_TEST_POOL": "0"},
                timeout=max(5.0, end - time.time()),
            )  # fmt: skip
            return names[at], done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            return names[at], 1, "did not end in time"
        finally:
            servers.stop(directory)

    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(run, range(len(names))))
    bad = [(name, said) for name, status, said in done if status not in (0, 5)]
    for name, said in bad:
        print(f"--- {name}\n{said[-3000:]}")
    missed = sum(status == 5 for _, status, _ in done)
    print(f"alone: {len(done) - len(bad) - missed} passed, {len(bad)} failed, {missed} not run for want of time")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
