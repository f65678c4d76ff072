"""Layer 3, channels: how a stream ends, and who writes after whom."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import os
import threading
from typing import Any

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import EndOfStream, InvalidState, PeerDied, PeerFailed, RecorderBusy, WaitTimeout

from ..harness import TIMEOUT, Peer
from .cases import Case, case  # noqa: F401
from .items import SHAPE, Spawn, fail_after, hang_in_slot, same, write_items


def test_the_stream_ends_when_its_writer_closes(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    reader = channel.reader()
    spawn(write_items, 3).join()
    for number in (1, 2, 3):
        with reader.get() as slot:
            assert slot.number == number
    for _ in range(2):
        with pytest.raises(EndOfStream):
            reader.get()
    assert list(reader.slots()) == []
    reader.close()
    reader.close()
    with channel.reader(start="oldest") as late:
        assert [slot.number for slot in late.slots()] == [1, 2, 3]
    with pytest.raises(InvalidState):
        channel.writer()


def test_a_writer_left_by_an_exception_fails_its_readers(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader() as reader:
        child = spawn(fail_after, 2)
        for number in (1, 2):
            with reader.get() as slot:
                assert same(slot.array, number)
        for _ in range(2):
            with pytest.raises(PeerFailed, match="unlucky") as caught:
                reader.get()
            assert (caught.value.session, caught.value.pid) == ("unlucky", child.pid)
        child.join()


def test_a_writers_death_ends_its_readers_after_the_last_item(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    reader = channel.reader()
    child = spawn(hang_in_slot, 3)
    child.recv()
    child.kill()
    for number in (1, 2, 3):
        with reader.get() as slot:
            assert same(slot.array, number)
    for _ in range(2):
        with pytest.raises(PeerDied, match="victim") as caught:
            reader.get()
        assert (caught.value.session, caught.value.pid) == ("victim", child.pid)
    reader.close()


def test_a_blocked_reader_hears_of_its_writers_death(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader() as reader:
        child = spawn(hang_in_slot, 0)
        child.recv()
        killer = threading.Timer(0.1, child.kill)
        killer.start()
        with pytest.raises(PeerDied):
            reader.get(timeout=None)
        killer.join()


def test_another_writer_takes_over(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device=case.device)
    waiting, raising = channel.reader(on_writer_death="wait"), channel.reader()
    seen = []
    for epoch in (1, 2, 3):
        child = spawn(hang_in_slot, 2)
        for _ in range(2):
            with waiting.get() as slot:
                assert same(slot.array, slot.number)
                assert slot.epoch == epoch
                seen.append(slot.number)
        child.recv()
        child.kill()
        if epoch == 1:
            for _ in range(2):
                raising.get().release()
            with pytest.raises(PeerDied):
                raising.get()  # and holds up no writer from here on, though it is still there
    assert seen == sorted(set(seen)), "a number was given twice"
    with pytest.raises(WaitTimeout, match="new writer"):
        waiting.get(timeout=0.05)
    with channel.writer() as writer:
        assert writer.epoch == 4
        with writer.slot() as written:
            written.array[...] = 1
        assert written.number is not None
        assert written.number > seen[-1]
    with waiting.get() as taken:
        assert taken.epoch == 4
    with pytest.raises(EndOfStream):
        waiting.get()
    raising.close()
    waiting.close()


def test_items_left_unread_outlive_their_writer_and_the_next(case: Case, session: Session, spawn: Spawn) -> None:
    """A reader that was busy while two writers died gets what each completed, in order, and nothing twice."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=6, device=case.device)
    with channel.reader(on_writer_death="wait") as reader:
        for _ in range(2):
            child = spawn(hang_in_slot, 2)
            child.recv()
            child.kill()
        with channel.writer() as writer, writer.slot() as slot:
            slot.array[...] = slot.number
        found = []
        for taken in reader.slots():
            assert same(taken.array, taken.number)
            found.append((taken.epoch, taken.number))
    assert [epoch for epoch, _ in found] == [1, 1, 2, 2, 3]
    numbers = [number for _, number in found]
    assert numbers == sorted(set(numbers))


def test_a_detached_writer_leaves_the_stream_open(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader() as reader:
        writer = channel.writer()
        with writer.slot() as slot:
            slot.array[...] = 1
        writer.detach()
        with pytest.raises(InvalidState), writer.slot():
            pass
        reader.get().release()
        with pytest.raises(WaitTimeout):
            reader.get(timeout=0.02)
        spawn(write_items, 1).join()
        with reader.get() as slot:
            assert (slot.number, slot.epoch) == (2, 1)
        with pytest.raises(EndOfStream):
            reader.get()


def try_to_write(peer: Peer) -> tuple[str, int]:
    with ipcsync.connect() as session, session.open_channel("frames") as channel:
        with pytest.raises(RecorderBusy) as caught:
            channel.writer()
        return caught.value.session, caught.value.pid


def test_one_writer_at_a_time(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.writer():
        assert spawn(try_to_write).join() == (session.name, os.getpid())


def test_closing_a_reader_waits_for_a_take_that_is_under_way(
    case: Case, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is closed its words are the next reader's: another thread's ``get()`` must not write them any more."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device=case.device)
    reader = channel.reader()
    taking, closed = threading.Event(), threading.Event()
    closed_meanwhile: list[bool] = []
    take = reader._turn.take

    def slowly(issued: int, bad: int) -> Any:
        taking.set()
        closed_meanwhile.append(closed.wait(0.3))
        return take(issued, bad)

    def close() -> None:
        assert taking.wait(TIMEOUT)
        reader.close()
        closed.set()

    monkeypatch.setattr(reader._turn, "take", slowly)
    thread = threading.Thread(target=close)
    thread.start()
    with channel.writer() as writer:
        with writer.slot() as slot:
            slot.array[...] = slot.number
        taken = reader.get()
        assert closed.wait(TIMEOUT)
        thread.join(TIMEOUT)
        assert closed_meanwhile == [False]
        with pytest.raises(InvalidState):
            taken.array  # noqa: B018
        taken.release()
        with channel.reader() as other:  # in the same cell
            for number in range(2, 6):
                with writer.slot() as slot:
                    slot.array[...] = slot.number
                with other.get() as item:
                    assert item.number == number
