"""Containers, as far as they matter here: processes in pid namespaces of their own that share the runtime directory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcsync import PeerDied, ask, connect

from ..harness import TIMEOUT, Broker, Hang, wait_until

_NEW = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
_TRY = subprocess.run([*_NEW, "true"], capture_output=True) if os.path.exists("/usr/bin/unshare") else None
pytestmark = pytest.mark.skipif(_TRY is None or _TRY.returncode != 0, reason="no new pid namespace may be made here")

WRITER = """
import os, sys, ipcsync
assert os.getpid() == 1
with ipcsync.connect(name="writer") as session:
    channel = session.create_channel("frames", shape=(4,), dtype="uint8", depth=2, device="cpu")
    with channel.writer() as writer:
        print("ready", flush=True)
        sys.stdin.readline()
        for item in range(3):
            with writer.slot() as slot:
                slot.array[...] = item
        print("written", flush=True)
        sys.stdin.readline()
"""

READER = """
import os, ipcsync
assert os.getpid() == 1
with ipcsync.connect(name="reader") as session:
    with session.open_channel("frames").reader(start="oldest") as reader:
        print("attached", flush=True)
        for _ in range(3):
            with reader.get() as slot:
                print(int(slot.array[0]), flush=True)
        try:
            reader.get()
        except ipcsync.PeerDied as error:
            print("died:", error.session, flush=True)
"""

STRANGER = """
import ipcsync
try:
    ipcsync.connect(timeout=2.0)
except ipcsync.BrokerUnavailable as error:
    print("refused:", error, flush=True)
"""


class Inside:
    """A program that is pid 1 of a namespace of its own."""

    def __init__(self, script: str, *wrap: str) -> None:
        self.process = subprocess.Popen(
            [*_NEW, *wrap, sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )  # no buffer: a second line that came with the first would lie in it, unseen by select

    def says(self) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], TIMEOUT)[0]:
            raise Hang("it said nothing")
        return self.process.stdout.readline().decode().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    @property
    def pid(self) -> int:
        """In our own namespace."""
        return child_of(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(wait_until(lambda: children.read_text().split(), "unshare's child")[0])


@pytest.fixture
def inside() -> Iterator[list[Inside]]:
    """What is put in it is ended."""
    made: list[Inside] = []
    yield made
    for each in made:
        each.end()


def test_a_broker_that_is_pid_1_leaves_on_sigterm(runtime: Path) -> None:
    with subprocess.Popen([*_NEW, sys.executable, "-m", "ipcsync_broker"]) as unshare:
        wait_until(lambda: (runtime / "broker.sock").exists(), "the broker's bind")
        os.kill(child_of(unshare.pid), signal.SIGTERM)
        assert unshare.wait(10) == 0


@pytest.fixture(params=["above", "beside"])
def somewhere(request: pytest.FixtureRequest, runtime: Path, inside: list[Inside]) -> Iterator[Path]:
    """The runtime directory of a broker that sees the pid namespaces below its own, or of one that sees none."""
    if request.param == "above":
        broker = Broker(runtime)
        yield runtime
        assert broker.stop() == 0, broker.log()
        return
    with subprocess.Popen([*_NEW, sys.executable, "-m", "ipcsync_broker"]) as unshare:
        wait_until(lambda: (runtime / "broker.sock").exists(), "the broker's bind")
        yield runtime
        os.kill(child_of(unshare.pid), signal.SIGTERM)
        assert unshare.wait(TIMEOUT) == 0


def test_processes_of_other_pid_namespaces_work_together_and_see_a_death(somewhere: Path, inside: list[Inside]) -> None:
    writer = Inside(WRITER)
    inside.append(writer)
    assert writer.says() == "ready"
    reader = Inside(READER)
    inside.append(reader)
    assert reader.says() == "attached"
    writer.go_on()
    assert [reader.says() for _ in range(3)] == ["0", "1", "2"]
    assert writer.says() == "written"
    assert list(somewhere.glob("mem-*"))
    os.kill(writer.pid, signal.SIGKILL)
    assert reader.says() == "died: writer"
    assert reader.process.wait(TIMEOUT) == 0
    # Not when the broker ends: it sees that the process is gone, and what only the dead held is free.
    wait_until(lambda: not leftovers(somewhere), "the return of memory, control and life files")
    assert sessions(somewhere) == 0


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(("mem-", "ctl-", "life-"))]


def sessions(directory: Path) -> int:
    with ask.Asker(directory) as asker:
        return int(asker.status()["sessions_total"])


SLEEPER = """
import sys, ipcsync
assert __import__("os").getpid() == 1
session = ipcsync.connect(name="sleeper")
channel = session.create_channel("held", shape=(1000,), dtype="uint8", depth=2, device="cpu")
print("ready", flush=True)
sys.stdin.readline()
"""


def test_one_dead_session_of_several_is_told_apart_by_its_lock(somewhere: Path, inside: list[Inside]) -> None:
    """Each is pid 1 of its own namespace, and has the same name: only its own file says who is gone."""
    inside += [Inside(SLEEPER.replace("held", f"held{n}")) for n in range(3)]
    assert [each.says() for each in inside] == ["ready"] * 3
    assert len(list(somewhere.glob("life-*"))) == len(list(somewhere.glob("mem-*"))) == 3
    os.kill(inside[1].pid, signal.SIGKILL)
    wait_until(lambda: sessions(somewhere) == 2, "the end of one")
    wait_until(lambda: len(list(somewhere.glob("mem-*"))) == 2, "the return of its memory")
    assert len(list(somewhere.glob("life-*"))) == 2
    inside[0].go_on()
    inside[2].go_on()
    assert [each.process.wait(TIMEOUT) for each in (inside[0], inside[2])] == [0, 0]
    wait_until(lambda: not any(somewhere.glob("life-*")), "the goodbyes")


STOPPED = """
import sys, ipcsync
with ipcsync.connect(name="stopped") as session:
    event = session.create_event("e", device="cpu")
    event.record()
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        event.record()
    except ipcsync.IpcSyncError as error:
        print(type(error).__name__, flush=True)
"""


BUSY = """
import ctypes, sys, ipcsync
with ipcsync.connect(name="busy") as session:
    event = session.create_event("busy", device="cpu")
    event.record()
    print("ready", flush=True)
    sys.stdin.readline()
    ctypes.PyDLL(None).sleep(8)  # with the GIL held
    event.record()
    print("recorded", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.watchdog(120)
def test_a_stop_is_seen_and_a_long_computation_is_none(somewhere: Path, inside: list[Inside]) -> None:
    """By the process's state where the broker sees it, else by heartbeats that ZeroMQ answers without Python."""
    stopped, busy = Inside(STOPPED), Inside(BUSY)
    inside += [stopped, busy]
    assert (stopped.says(), busy.says()) == ("ready", "ready")
    with connect() as session:
        event, long = session.open_event("e"), session.open_event("busy")
        busy.go_on()
        os.kill(stopped.pid, signal.SIGSTOP)
        with pytest.raises(PeerDied) as caught:
            event.synchronize(round=2, timeout=None)
        assert caught.value.fields["session"] == "stopped"
        long.synchronize(round=2, timeout=None)
        assert busy.says() == "recorded"
        busy.go_on()
        assert busy.process.wait(TIMEOUT) == 0
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.go_on()
    assert stopped.says() == "StaleHandle"
    assert stopped.process.wait(TIMEOUT) == 0


def test_a_shm_of_its_own_is_a_clear_refusal(broker: Broker, inside: list[Inside]) -> None:
    stranger = Inside(STRANGER, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
    inside.append(stranger)
    assert stranger.says().startswith(f"refused: no broker: {broker.runtime} does not exist")
