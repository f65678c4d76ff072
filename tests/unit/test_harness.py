"""The harness itself: children, their errors, and that the look for leaks finds what is planted."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import Child, Hang, Peer, files_of, processes_of, segments, unused
from tests.places import Runtime, came_back, sweep


def echo(peer: Peer, word: str) -> str:
    peer.send(word + peer.recv())
    return "returned"


def fail(peer: Peer) -> None:
    peer.send("about to")
    raise LookupError("nothing here")


def stay(peer: Peer) -> None:
    peer.send(os.environ["IPCSYNC_RUNTIME_DIR"])
    peer.recv(timeout=600)


def test_a_child_talks_and_returns(spawn: Callable[..., Child]) -> None:
    child = spawn(echo, "ping ")
    child.send("pong")
    assert child.recv() == "ping pong"
    assert child.join() == "returned"


def test_what_a_child_raises_is_raised_here_with_its_traceback(spawn: Callable[..., Child]) -> None:
    child = spawn(fail)
    assert child.recv() == "about to"
    with pytest.raises(LookupError, match="nothing here") as caught:
        child.join()
    assert "in fail" in str(caught.value.__cause__)


def test_an_error_that_nobody_asked_for_is_kept() -> None:
    child = Child(fail, ())
    child.process.join(30)
    assert isinstance(child.end(), LookupError)


def test_a_silent_child_is_a_hang(spawn: Callable[..., Child]) -> None:
    child = spawn(stay)
    child.recv()
    with pytest.raises(Hang, match="sent nothing"):
        child.recv(timeout=0.01)


def test_a_killed_child_says_so(spawn: Callable[..., Child]) -> None:
    child = spawn(stay)
    child.recv()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="exit code -9"):
        child.recv()


def test_children_get_the_runtime_directory(spawn: Callable[..., Child], runtime: Path) -> None:
    assert spawn(stay).recv() == str(runtime)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    yield made
    made.remove()
    assert not made.path.exists()


def test_a_clean_directory_has_no_leaks(place: Runtime) -> None:
    (place.path / "broker.lock").touch()
    (place.path / "l1").mkdir()
    assert place.leaks() == []


@pytest.mark.parametrize("name", ["mem-1", "ctl-1", "smem-1-1", "broker.sock", "l1/00ff"])
def test_a_planted_file_is_found(place: Runtime, name: str) -> None:
    (place.path / "l1").mkdir()
    (place.path / name).touch()
    assert files_of(place.path) == [name]
    assert files_of(place.path, ("broker.lock", "l1", name)) == []


def test_a_planted_process_is_found_and_removed(place: Runtime) -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        env={**os.environ, "IPCSYNC_RUNTIME_DIR": str(place.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with sleeper:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        assert [pid for pid, _ in processes_of(place.path)] == [sleeper.pid]
        place.remove()
        assert sleeper.wait(30) == -signal.SIGKILL
    assert processes_of(place.path) == []


def test_a_directory_is_removed_though_somebody_fills_it_until_the_end(place: Runtime) -> None:
    """A process that makes files, and the directory itself, again and again; killed, it is not gone at once."""
    busy = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys\n"
            "print(flush=True)\n"
            "while True:\n"
            "    os.makedirs(sys.argv[1], exist_ok=True)\n"
            "    try: open(sys.argv[1] + '/mem-1', 'w').close()\n"
            "    except OSError: pass\n",
            str(place.path),
        ],
        env={**os.environ, "IPCSYNC_RUNTIME_DIR": str(place.path)},
        stdout=subprocess.PIPE,
    )
    with busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        place.remove()
        assert busy.wait(30) == -signal.SIGKILL
    assert not place.path.exists()
    assert str(place.path) not in came_back()


def test_a_directory_that_is_made_again_is_told(place: Runtime) -> None:
    place.remove()
    assert str(place.path) not in came_back()
    place.path.mkdir()
    assert str(place.path) in came_back()
    place.path.rmdir()


def make_and_crash(peer: Peer, how: int) -> None:
    made = Runtime()
    (made.path / "mem-1").touch()
    subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        env={**os.environ, "IPCSYNC_RUNTIME_DIR": str(made.path)},
        stdout=subprocess.PIPE,
    )
    peer.send(str(made.path))
    peer.recv()
    os.kill(os.getpid(), how)


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL])
def test_what_a_test_that_crashed_left_is_swept_and_nothing_else(place: Runtime, how: int) -> None:
    """With the processes that it started. Before, it is its own."""
    child = Child(make_and_crash, (how,))
    path = Path(child.recv())
    assert path.name not in sweep()
    child.send()
    child.process.join(30)
    assert child.process.exitcode == -how
    swept = sweep()  # unless another run was faster
    assert not path.exists()
    assert processes_of(path) == []
    assert place.path.name not in swept
    assert place.path.is_dir()
    child.end()


def test_a_planted_segment_is_found() -> None:
    planted = Path(f"/dev/shm/planted-{os.getpid()}")
    before = segments()
    planted.write_bytes(bytes(4096))
    try:
        assert planted.name in segments() - before
        assert unused({planted.name, "never-was"}) == {planted.name}
        with planted.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert unused({planted.name}) == set(), "it is in use"
    finally:
        planted.unlink()


def test_the_watchdog_barks_and_leaks_fail_a_test(tmp_path: Path) -> None:
    """Both seen from outside, in a pytest of their own."""
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "conftest.py").write_text("from tests.conftest import *\n")
    (suite / "test_bad.py").write_text(
        "import pytest, threading\n"
        "@pytest.mark.watchdog(1)\n"
        "def test_hang(): threading.Event().wait()\n"
        "def test_leak(runtime, monkeypatch):\n"
        "    monkeypatch.setattr('time.monotonic', iter(range(0, 10**6, 10)).__next__)\n"
        "    (runtime / 'mem-7').touch()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(suite), str(suite)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert "took longer than 1 s" in done.stdout
    assert "file mem-7 was left in the runtime directory" in done.stdout
    assert "1 failed, 1 passed, 1 error" in done.stdout


def test_a_run_removes_what_its_crashed_worker_left(tmp_path: Path) -> None:
    suite, told = tmp_path / "suite", tmp_path / "told"
    suite.mkdir()
    (suite / "conftest.py").write_text("from tests.conftest import *\n")
    (suite / "test_bad.py").write_text(
        "import os, pathlib\n"
        "def test_crash(broker):\n"
        f"    pathlib.Path({str(told)!r}).write_text(str(broker.runtime))\n"
        "    os._exit(3)\n"
    )
    options = ["-p", "no:cacheprovider", "-n", "1", "--max-worker-restart", "0", "--rootdir", str(suite)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(suite)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert "1 failed" in done.stdout
    runtime = Path(told.read_text())
    assert not runtime.exists()
    assert processes_of(runtime) == [], "its broker"
