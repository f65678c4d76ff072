"""Channels while their broker is dead, after it came back, and beside a process that is stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import EndOfStream, PeerDied, StaleHandle, WaitTimeout

from ..harness import Broker, Child, Peer

Spawn = Callable[..., Child]
SHAPE = (32, 32)


def hold(peer: Peer, count: int) -> None:
    """Takes `count` items and keeps them."""
    reader = ipcsync.connect(name="holder").open_channel("frames").reader()
    peer.send("attached")
    held = [reader.get() for _ in range(count)]
    peer.send([slot.number for slot in held])
    signal.pause()


def write_and_hang(peer: Peer, count: int) -> None:
    writer = ipcsync.connect(name="victim").open_channel("frames").writer()
    for _ in range(count):
        with writer.slot() as slot:
            slot.array[...] = slot.number
    with writer.slot():
        peer.send("in a slot")
        signal.pause()


def read_to_the_end(peer: Peer) -> list[int]:
    numbers = []
    with ipcsync.connect(name="reader") as session, session.open_channel("frames").reader() as reader:
        peer.send("attached")
        for slot in reader.slots():
            assert (slot.array == slot.number).all()
            numbers.append(slot.number)
    return numbers


def put(writer: ipcsync.Writer, count: int) -> None:
    for _ in range(count):
        with writer.slot() as slot:
            slot.array[...] = slot.number


def test_a_writer_goes_on_past_a_dead_reader_with_no_broker(session: Session, broker: Broker, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device="cpu")
    child = spawn(hold, 3)
    child.recv()
    writer = channel.writer()
    put(writer, 3)
    assert child.recv() == [1, 2, 3]
    broker.kill()
    with pytest.raises(WaitTimeout), writer.slot(timeout=0.1):
        pass
    child.kill()
    put(writer, 5)
    broker.start()
    put(writer, 5)
    writer.close()


def test_a_reader_hears_of_its_writers_death_with_no_broker(session: Session, broker: Broker, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device="cpu")
    reader = channel.reader()
    child = spawn(write_and_hang, 2)
    child.recv()
    broker.kill()
    child.kill()
    for number in (1, 2):
        with reader.get() as slot:
            assert slot.number == number
    with pytest.raises(PeerDied, match="victim"):
        reader.get()
    broker.start()
    reader.close()


def test_no_item_is_lost_or_repeated_over_the_brokers_death(session: Session, broker: Broker, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device="cpu")
    readers = [spawn(read_to_the_end) for _ in range(2)]
    for reader in readers:
        reader.recv()
    writer = channel.writer()
    for _ in range(3):
        put(writer, 40)
        broker.kill()
        put(writer, 40)
        broker.start()
    with channel.reader() as late:  # joins, leaves and ends are as they were
        put(writer, 1)
        with late.get() as slot:
            assert slot.number == 241
        writer.close()
        with pytest.raises(EndOfStream):
            late.get()
    for reader in readers:
        assert reader.join() == list(range(1, 242))


def hold_until_told(peer: Peer) -> str:
    reader = ipcsync.connect(name="sleeper").open_channel("frames").reader()
    peer.send("attached")
    slot = reader.get()
    peer.send(slot.number)
    peer.recv()
    assert (slot.array == 1).all(), "what a stopped process holds was overwritten"
    with pytest.raises(StaleHandle) as caught:
        reader.get()
    return str(caught.value)


@pytest.mark.slow
def test_a_stopped_reader_keeps_what_it_holds_and_holds_nobody_up(session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device="cpu")
    child = spawn(hold_until_told)
    child.recv()
    with channel.writer() as writer:
        put(writer, 1)
        assert child.recv() == 1
        child.kill(signal.SIGSTOP)
        put(writer, 30)  # in the other two buffers, once its lease ran out
        child.send("go on")
        child.kill(signal.SIGCONT)
        assert "taken for" in child.join()
        put(writer, 5)
