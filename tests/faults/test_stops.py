"""Processes that stand still: stopped ones lose their lease and are told, ones that hold the GIL do not, and a broker
that was stopped itself takes nobody's silence for death.

``IPCSYNC_FAULT_HOLD`` says how many seconds (5; 10 for docs/reliability.md).
"""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import PeerDied
from ipcsync.ledger import FOREVER

from ..harness import Broker, Child, Peer, wait_until
from .bench import asked, figures

Spawn = Callable[..., Child]
HOLD = asked("HOLD", 5)


def stopped(peer: Peer) -> list[str]:
    """Records, writes and reads; is stopped in between; then tries all three again, over and over."""
    session = ipcsync.connect(name="sleeper", default_timeout=10.0)
    event, array = session.open_event("e"), session.open_array("a")
    writer = session.open_channel("c").writer()
    reader = session.open_channel("d").reader()
    event.record()
    with writer.slot() as slot:
        slot.array[...] = 1
    with array.write() as view:
        view["a"][...] = 1
    peer.send("stop me")
    peer.recv()
    told = []

    def write() -> None:
        with writer.slot() as slot:
            slot.array[...] = 2

    def change() -> None:
        with array.write() as view:
            view["a"][...] = 2

    for call in (event.record, write, change, lambda: reader.get(timeout=0), lambda: session.create_event("n")):
        try:
            call()
            told.append("nothing")
        except ipcsync.IpcSyncError as error:
            told.append(type(error).__name__)
    return told


@pytest.mark.slow
def test_a_stopped_process_is_taken_for_dead_and_told(session: Session, spawn: Spawn) -> None:
    event = session.create_event("e", device="cpu")
    array = session.create_array("a", {"a": ipcsync.Field((8,), "int64")}, device="cpu")
    made = session.create_channel("c", shape=(8,), dtype="int64", device="cpu")
    session.create_channel("d", shape=(8,), dtype="int64", depth=2, device="cpu")
    with made.reader(start="oldest") as reader:
        child = spawn(stopped)
        child.recv()
        child.kill(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PeerDied, match="stopped"):
            event.synchronize(round=2, timeout=25.0)
        took = [time.monotonic() - began]
        reader.get().release()
        with pytest.raises(PeerDied):
            reader.get(timeout=25.0)
        took.append(time.monotonic() - began)
        with array.read() as view:
            assert (view["a"] == 1).all(), "what it had completed stays"
        time.sleep(max(0.0, began + HOLD - time.monotonic()) if HOLD > 5 else 0.0)
        child.send("go on")
        child.kill(signal.SIGCONT)
        told = child.join()
        assert "nothing" not in told, told
        assert set(told) <= {"StaleHandle", "PeerDied", "SessionClosed"}, told
        with array.read() as view:
            assert (view["a"] == 1).all(), "and it wrote nothing since"
    figures("stopped -> told", took, 4.0)


def hold_the_gil(peer: Peer, seconds: int) -> int:
    """PyDLL keeps the GIL through the call: no thread of this process runs Python meanwhile."""
    session = ipcsync.connect(name="busy")
    event, reader = session.open_event("e"), session.open_channel("c").reader()
    event.record()
    slot = reader.get()
    peer.send("holding")
    before = time.monotonic()
    ctypes.PyDLL(None).sleep(seconds)
    assert time.monotonic() - before >= seconds
    assert (slot.array == 1).all()
    slot.release()
    return event.record()


@pytest.mark.slow
def test_who_holds_the_gil_is_not_dead(session: Session, spawn: Spawn) -> None:
    event = session.create_event("e", device="cpu")
    made = session.create_channel("c", shape=(8,), dtype="int64", depth=2, device="cpu")
    child = spawn(hold_the_gil, HOLD)
    with made.writer() as writer:
        wait_until(lambda: event.issued == 1, "its record")
        with writer.slot() as slot:
            slot.array[...] = 1
        assert child.recv() == "holding"
        event.synchronize(round=2, timeout=HOLD + 25.0)  # its own record, afterwards: nobody took it for dead
        assert event._timeline.verdict == FOREVER
        assert child.join() == 2
        for _ in range(4):
            with writer.slot() as slot:
                slot.array[...] = 2


def exchange(peer: Peer) -> int:
    """Passes on what it gets, until the stream ends."""
    count = 0
    with ipcsync.connect(name="relay") as session:
        event = session.open_event("e")
        with session.open_channel("c").reader() as reader:
            peer.send("joined")
            for slot in reader.slots():
                assert (slot.array == slot.number).all()
                count = event.record()
    return count


@pytest.mark.slow
def test_a_broker_that_was_stopped_declares_nobody_dead(session: Session, broker: Broker, spawn: Spawn) -> None:
    event = session.create_event("e", device="cpu")
    made = session.create_channel("c", shape=(8,), dtype="int64", depth=2, device="cpu")
    child = spawn(exchange)
    child.recv()
    with made.writer() as writer:

        def pass_one() -> None:
            with writer.slot() as slot:
                slot.array[...] = slot.number
            event.synchronize(round=slot.number)

        pass_one()
        broker.process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + HOLD
        while time.monotonic() < until:
            pass_one()
        broker.process.send_signal(signal.SIGCONT)
        other = session.create_event("other", device="cpu")  # it serves again
        for _ in range(100):
            pass_one()
        assert event._timeline.verdict == FOREVER
        assert other.record() == 1
    assert child.join() == event.completed
    session.check()  # raises where its lease ran out
