"""Layer 3, channels: what is ordered by streams, and what was never finished."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import signal
from typing import Any

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import PeerDied, WaitTimeout

from ..harness import Peer
from .cases import Case, case  # noqa: F401
from .items import SHAPE, Spawn, same


def test_the_writers_host_does_not_wait_for_the_readers_stream(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device=case.device)
    reading, writing = case.stream(), case.stream()
    with channel.reader() as reader, channel.writer() as writer:
        for value in (1, 2):
            with writer.slot() as slot:
                slot.array[...] = value
        held = [reader.get(reading) for _ in range(2)]
        gate = case.hold(reading)
        copies = [case.copy_later(reading, taken.array) for taken in held]
        for taken in held:
            taken.release()  # on the stream, which is still before its copies
        with writer.slot(writing) as slot:
            case.fill(writing, slot.array, 9)
        with pytest.raises(WaitTimeout):  # the writer's stream would run over what the reader's has still to read
            slot.confirm(timeout=0.05)
        gate.open()
        slot.confirm()
        reading.synchronize()
        assert [same(copy, value) for copy, value in zip(copies, (1, 2), strict=True)] == [True, True]


def test_the_writers_stream_comes_after_every_readers(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device=case.device)
    streams, writing = [case.stream() for _ in range(3)], case.stream()
    readers = [channel.reader() for _ in streams]
    with channel.writer() as writer:
        for value in (1, 2):
            with writer.slot() as slot:
                slot.array[...] = value
        gates, copies = [], []
        for reader, reading in zip(readers, streams, strict=True):
            held = [reader.get(reading) for _ in range(2)]
            gates.append(case.hold(reading))
            copies.append(case.copy_later(reading, held[0].array))
            for taken in held:
                taken.release()
        with writer.slot(writing) as slot:
            case.fill(writing, slot.array, 3)
        for gate in gates:
            with pytest.raises(WaitTimeout):  # until the last is open
                slot.confirm(timeout=0.05)
            gate.open()
        slot.confirm()
        for reader, reading, copy in zip(readers, streams, copies, strict=True):
            reading.synchronize()
            assert same(copy, 1)
            with reader.get() as taken:
                assert same(taken.array, 3)
            reader.close()


def test_items_written_on_several_streams_stay_in_order(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    slow, fast = case.stream(), case.stream()
    with channel.reader() as reader, channel.writer() as writer:
        gate = case.hold(slow)
        for stream, value in ((slow, 1), (fast, 2)):
            with writer.slot(stream) as slot:
                case.fill(stream, slot.array, value)
        with pytest.raises(WaitTimeout):
            slot.confirm(timeout=0.02)
        gate.open()
        for number in (1, 2):
            with reader.get() as got:
                got.confirm()
                assert got.number == number
                assert same(got.array, number)


def write_slowly(peer: Peer, device: str) -> None:
    """Publishes item 1, whose stream never gets to it."""
    case = Case(device)
    session = ipcsync.connect(name="victim")
    writer, stream = session.open_channel("frames").writer(), case.stream()
    case.hold(stream)
    with writer.slot(stream) as slot:
        case.fill(stream, slot.array, 1)
    peer.send("published")
    signal.pause()


def confirm(slot: Any, reader: Any) -> None:
    slot.confirm()


def leave_turn(slot: Any, reader: Any) -> None:
    with slot:
        pass


def take_next(slot: Any, reader: Any) -> None:
    slot.release()
    reader.get()


def close(slot: Any, reader: Any) -> None:
    reader.close()


@pytest.mark.parametrize("commit", [confirm, leave_turn, take_next, close])
def test_what_was_never_finished_does_not_pass(case: Case, session: Session, spawn: Spawn, commit: Any) -> None:
    """The item is published, its reader's stream waits for it, and the writer dies: every commit point says so."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    reader, stream = channel.reader(), case.stream()
    child = spawn(write_slowly, case.device)
    child.recv()
    slot = reader.get(stream)
    child.kill()
    stream.synchronize()  # released, over data that was never written
    with pytest.raises(PeerDied, match="victim"):
        commit(slot, reader)
    reader.close()
