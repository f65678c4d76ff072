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


@pytest.mark.leaves("ctl-*", "mem-*")  # the broker cannot see when a process of another namespace is gone for good
def test_processes_of_other_pid_namespaces_work_together_and_see_a_death(broker: Broker, inside: list[Inside]) -> None:
    writer = Inside(WRITER)
    inside.append(writer)
    assert writer.says() == "ready"
    reader = Inside(READER)
    inside.append(reader)
    assert reader.says() == "attached"
    writer.go_on()
    assert [reader.says() for _ in range(3)] == ["0", "1", "2"]
    assert writer.says() == "written"
    os.kill(writer.pid, signal.SIGKILL)
    assert reader.says() == "died: writer"
    assert reader.process.wait(TIMEOUT) == 0


def test_a_shm_of_its_own_is_a_clear_refusal(broker: Broker, inside: list[Inside]) -> None:
    stranger = Inside(STRANGER, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
    inside.append(stranger)
    assert stranger.says().startswith(f"refused: no broker: {broker.runtime} does not exist")
