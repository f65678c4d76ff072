"""Layer 3, channels: every rule in real processes, with every value checked."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import ipcsync
from ipcsync import Field, Session
from ipcsync.errors import (
    EndOfStream,
    InvalidArgument,
    InvalidState,
    MetaTooLarge,
    NameInUse,
    NotFound,
    PeerDied,
    PeerFailed,
    RecorderBusy,
    SessionClosed,
    WaitTimeout,
)

from ..harness import Child, Peer, wait_until
from .cases import Case, case  # noqa: F401

Spawn = Callable[..., Child]
SHAPE = (4, 8)
JOINS = int(os.environ.get("IPCSYNC_JOINS", "40"))  # how often each of two readers joins and leaves


def host(array: Any) -> numpy.ndarray:
    """The values, copied to the host once the current stream got there."""
    return array.get() if hasattr(array, "get") else numpy.array(array)


def same(array: Any, value: Any) -> bool:
    return bool((host(array) == value).all())


# -- children: a writer of items whose every element is their number, and a reader that checks them


def write_items(peer: Peer, count: int) -> None:
    with ipcsync.connect(name="writer") as session, session.open_channel("frames").writer() as writer:
        for _ in range(count):
            with writer.slot() as slot:
                slot.array[...] = slot.number
                slot.meta["number"] = slot.number


def read_all(peer: Peer, **options: Any) -> list[int]:
    numbers = []
    with ipcsync.connect(name="reader") as session, session.open_channel("frames").reader(**options) as reader:
        peer.send("attached")
        for slot in reader.slots():
            assert same(slot.array, slot.number), f"item {slot.number} holds {host(slot.array)}"
            assert slot.meta == {"number": slot.number}
            numbers.append(slot.number)
    return numbers


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_every_reader_gets_every_item_once_in_order(case: Case, session: Session, spawn: Spawn, depth: int) -> None:
    session.create_channel("frames", shape=SHAPE, dtype="int32", depth=depth, device=case.device)
    readers = [spawn(read_all) for _ in range(2)]
    for reader in readers:
        assert reader.recv() == "attached"
    spawn(write_items, 100).join()
    for reader in readers:
        assert reader.join() == list(range(1, 101))


def test_slots_are_held_together_and_released_in_any_order(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device=case.device)
    with channel.reader() as reader, channel.writer() as writer:
        for order in itertools.permutations(range(3)):
            numbers = []
            for _ in range(3):
                with writer.slot() as slot:
                    slot.array[...] = slot.number
                numbers.append(slot.number)
            held = [reader.get() for _ in range(3)]
            assert [slot.number for slot in held] == numbers
            with pytest.raises(WaitTimeout, match="no buffer"), writer.slot(timeout=0.02):
                pass
            for i in order[:2]:
                held[i].release()
            with writer.slot() as slot:  # in one of the two that are free; the third is as it was
                slot.array[...] = -1
                assert same(held[order[2]].array, numbers[order[2]])
                slot.discard()
            held[order[2]].release()


def test_a_slots_arrays_end_with_its_turn(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader() as reader, channel.writer() as writer:
        with pytest.raises(InvalidState):
            _ = writer.slot().array
        with writer.slot() as slot:
            slot.array[...] = 1
        with pytest.raises(InvalidState):
            _ = slot.array
        with pytest.raises(InvalidState):
            slot.__enter__()
        taken = reader.get()
        taken.release()
        taken.release()
        with pytest.raises(InvalidState):
            _ = taken.array
        with writer.slot():
            pass
        for taken in reader.slots():
            taken.release()  # before the turn ends: nothing more to do then
            break


def test_nothing_is_published_by_an_exception_or_a_discard(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device=case.device)
    with channel.reader() as reader, channel.writer() as writer:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError), writer.slot() as slot:
                slot.array[...] = 1 // 0
            with writer.slot() as slot:
                slot.discard()
            assert slot.number is None
        with writer.slot() as slot:
            slot.array[...] = 7
        taken = reader.get()
        assert taken.number == slot.number == 1
        assert same(taken.array, 7)
        with pytest.raises(WaitTimeout):
            reader.get(timeout=0.02)


def test_meta_travels_with_its_item(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=(1,), dtype="int8", meta_bytes=100, device=case.device)
    with channel.reader() as reader, channel.writer() as writer:
        with writer.slot(meta={"name": "ä", "box": [1, 2.5, None, True]}) as slot:
            slot.meta["late"] = b"\0\xff"
        with writer.slot():
            pass
        with pytest.raises(MetaTooLarge, match="room for 100"), writer.slot(meta={"x": "y" * 100}):
            pass
        with pytest.raises(InvalidArgument, match="msgpack"), writer.slot(meta={"x": object()}):
            pass
        first, second = reader.get(), reader.get()
        first.release()
        assert first.meta == {"name": "ä", "box": [1, 2.5, None, True], "late": b"\0\xff"}
        assert second.meta == {}
        with pytest.raises(WaitTimeout):
            reader.get(timeout=0.02)


def test_items_may_be_smaller_than_their_fields(case: Case, session: Session) -> None:
    fields = {"ids": Field((4, 6), "int64"), "mask": Field((4,), "bool"), "scale": Field((), "float32")}
    channel = session.create_channel("batch", fields=fields, depth=2, device=case.device)
    assert channel.fields == fields
    with channel.reader() as reader, channel.writer() as writer:
        for rows in (4, 2, 0, 3):
            with writer.slot() as slot:
                slot.resize("ids", (rows, 6))
                if rows != 4:
                    slot.resize("mask", rows)
                assert slot["ids"].shape == (rows, 6)
                slot["ids"][...] = rows
                slot["mask"][...] = True
                slot["scale"][...] = rows / 2
                for bad in ((5, 6), (1,), (-1, 6)):
                    with pytest.raises(InvalidArgument):
                        slot.resize("ids", bad)
                with pytest.raises(InvalidArgument):
                    slot.resize("nothing", 1)
            with reader.get() as taken:
                assert list(taken) == ["ids", "mask", "scale"]
                assert taken["ids"].shape == (rows, 6)
                assert taken["mask"].shape == (rows,)
                assert same(taken["ids"], rows)
                assert host(taken["scale"]) == numpy.float32(rows / 2)
                with pytest.raises(InvalidState, match="ids, mask, scale"):
                    _ = taken.array


def test_every_kind_of_element_arrives_as_written(case: Case, session: Session) -> None:
    for i, dtype in enumerate(["bool", "uint8", "int16", "uint32", "int64", "float16", "float64", "complex64"]):
        channel = session.create_channel(f"c{i}", shape=(3,), dtype=dtype, depth=2, device=case.device)
        with channel.reader() as reader, channel.writer() as writer:
            with writer.slot() as slot:
                assert slot.array.dtype == numpy.dtype(dtype)
                slot.array[...] = case.array([0, 1, 1], dtype)
            with reader.get() as taken:
                assert host(taken.array).tolist() == numpy.array([0, 1, 1], dtype).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_have_names(case: Case, session: Session, dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if case.device != "cpu" and dtype != "bfloat16":
        pytest.skip("CuPy has no float8 arrays")
    channel = session.create_channel("frames", shape=(4,), dtype=dtype, depth=2, device=case.device)
    assert channel.fields["array"].dtype == dtype
    with channel.reader() as reader, channel.writer() as writer:
        with writer.slot() as slot:
            slot.array[...] = case.array(numpy.array([0, 0.5, 1, -2], getattr(ml_dtypes, dtype)), dtype)
        with reader.get() as taken:
            assert taken.array.dtype == numpy.dtype(getattr(ml_dtypes, dtype))
            assert host(taken.array).astype("float32").tolist() == [0, 0.5, 1, -2]


def test_readers_arrays_are_read_only_on_the_host(case: Case, session: Session) -> None:
    if case.device != "cpu":
        pytest.skip("CUDA has no read-only mappings")
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader() as reader, channel.writer() as writer:
        with writer.slot() as slot:
            slot.array[...] = 5
        with reader.get() as taken:
            with pytest.raises(ValueError, match="read-only"):
                taken.array[0] = 1
            assert taken.array.__array_interface__["data"][1]
            assert numpy.from_dlpack(taken.array).sum() == 5 * 32


# -- ends


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


def fail_after(peer: Peer, count: int) -> None:
    with ipcsync.connect(name="unlucky") as session:
        try:
            with session.open_channel("frames").writer() as writer:
                for _ in range(count):
                    with writer.slot() as slot:
                        slot.array[...] = slot.number
                raise ValueError("no more")
        except ValueError:
            pass


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


def hang_in_slot(peer: Peer, count: int) -> None:
    """Publishes `count` items and stays in the next one's block."""
    session = ipcsync.connect(name="victim")
    writer = session.open_channel("frames").writer()
    for _ in range(count):
        with writer.slot() as slot:
            slot.array[...] = slot.number
    with writer.slot() as slot:
        slot.array[...] = -1
        peer.send("in the slot")
        signal.pause()


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


# -- readers come, go, are slow, die


def hold_everything(peer: Peer, depth: int) -> None:
    session = ipcsync.connect(name="hoarder")
    reader = session.open_channel("frames").reader()
    peer.send("attached")
    held = [reader.get() for _ in range(depth)]
    peer.send([slot.number for slot in held])
    signal.pause()


def test_a_readers_death_frees_what_it_held(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device=case.device)
    child = spawn(hold_everything, 3)
    child.recv()
    with channel.writer() as writer:
        for _ in range(3):
            with writer.slot() as slot:
                slot.array[...] = slot.number
        assert child.recv() == [1, 2, 3]
        with pytest.raises(WaitTimeout), writer.slot(timeout=0.05):
            pass
        child.kill()
        for _ in range(4):
            with writer.slot() as slot:
                slot.array[...] = slot.number


def come_and_go(peer: Peer, rounds: int) -> int:
    seen = 0
    with ipcsync.connect() as session, session.open_channel("frames") as channel:
        for i in range(rounds):
            with channel.reader("latest" if i % 3 == 2 else "block", "oldest" if i % 2 else "next") as reader:
                last = 0
                for slot in itertools.islice(reader.slots(), 1 + i % 4):
                    assert same(slot.array, slot.number), f"item {slot.number} was overwritten"
                    assert slot.number == last + 1 or last == 0 or reader.policy == "latest"
                    last = slot.number
                    seen += 1
    return seen


@pytest.mark.watchdog(60 + JOINS // 20)
def test_readers_join_and_leave_while_the_writer_runs(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device=case.device)
    children = [spawn(come_and_go, JOINS) for _ in range(2)]
    with channel.writer() as writer:
        while not all(child.returned() for child in children):
            with writer.slot() as slot:
                slot.array[...] = slot.number
    assert all(child.join() > JOINS for child in children)


def test_latest_skips_what_it_was_too_slow_for(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device=case.device)
    with channel.reader(policy="latest") as reader, channel.writer() as writer:
        taken, skipped = [], 0
        for burst in (1, 5, 2, 10):
            for _ in range(burst):
                with writer.slot() as slot:
                    slot.array[...] = slot.number
            with reader.get() as got:
                assert got.number == slot.number
                assert same(got.array, got.number)
                assert got.skipped == burst - 1
                skipped += got.skipped
                taken.append(got.number)
        assert taken == [1, 6, 8, 18]
        assert reader.skipped == skipped == 14
        with pytest.raises(WaitTimeout):
            reader.get(timeout=0.02)


def test_latest_keeps_what_it_holds(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device=case.device)
    with channel.reader(policy="latest") as reader, channel.writer() as writer:
        with writer.slot() as slot:
            slot.array[...] = 1
        with reader.get() as held:
            for _ in range(5):
                with writer.slot() as slot:
                    slot.array[...] = slot.number
            assert same(held.array, 1)
        with reader.get() as got:
            assert got.number == 6


def test_a_late_reader_starts_where_it_asks(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    with channel.writer() as writer:
        for _ in range(6):
            with writer.slot() as slot:
                slot.array[...] = slot.number
        with channel.reader(start="oldest") as oldest, channel.reader() as newest:
            assert [oldest.get().number for _ in range(4)] == [3, 4, 5, 6]
            with pytest.raises(WaitTimeout):
                newest.get(timeout=0.02)


# -- groups


def read_in_group(peer: Peer, hold: bool) -> list[int]:
    """Takes items until the end; with `hold`, keeps its first until it is told to go on."""
    numbers: list[int] = []
    with ipcsync.connect(name="member") as session, session.open_channel("frames").reader(group="g") as reader:
        peer.send("attached")
        for slot in reader.slots():
            assert same(slot.array, slot.number)
            if hold and not numbers:
                peer.send(slot.number)
                peer.recv()
            numbers.append(slot.number)
    return numbers


def test_a_group_shares_the_items(case: Case, session: Session, spawn: Spawn) -> None:
    session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    members, other = [spawn(read_in_group, False) for _ in range(3)], spawn(read_all)
    for child in (*members, other):
        child.recv()
    spawn(write_items, 60).join()
    assert other.join() == list(range(1, 61))
    shares = [member.join() for member in members]
    assert all(share == sorted(share) for share in shares)
    assert sorted(itertools.chain(*shares)) == list(range(1, 61))


def test_a_busy_member_gets_less(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    busy = spawn(read_in_group, True)
    busy.recv()
    with channel.writer() as writer:
        with writer.slot() as slot:
            slot.array[...] = 1
        assert busy.recv() == 1  # and holds it, until the other has got the rest
        free = spawn(read_in_group, False)
        free.recv()
        for _ in range(20):
            with writer.slot() as slot:
                slot.array[...] = slot.number
        busy.send()
    shares = [busy.join(), free.join()]
    assert sorted(itertools.chain(*shares)) == list(range(1, 22))
    assert len(shares[1]) >= 16, "of twenty, all but what was not taken yet when the busy one went on (depth 4)"


@pytest.mark.parametrize("redeliver", [True, False])
def test_a_dead_members_item_is_given_again_or_dropped(
    case: Case, session: Session, spawn: Spawn, redeliver: bool
) -> None:
    channel = session.create_channel(
        "frames", shape=SHAPE, dtype="int32", depth=3, device=case.device, redeliver=redeliver
    )
    victim = spawn(read_in_group, True)
    victim.recv()
    with channel.writer() as writer, channel.reader(group="g") as reader:
        with writer.slot() as slot:
            slot.array[...] = 1
        assert victim.recv() == 1
        victim.kill()
        found = []
        for _ in range(5):
            with writer.slot() as slot:
                slot.array[...] = slot.number
            with reader.get() as taken:
                assert same(taken.array, taken.number)
                found.append(taken.number)
        writer.close()
        for taken in reader.slots():
            assert same(taken.array, taken.number)
            found.append(taken.number)
    assert sorted(found) == ([1, 2, 3, 4, 5, 6] if redeliver else [2, 3, 4, 5, 6])


def test_the_stream_is_not_over_while_a_member_may_still_die(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=3, device=case.device)
    victim = spawn(read_in_group, True)
    victim.recv()
    with channel.reader(group="g") as reader:
        with channel.writer() as writer, writer.slot() as slot:
            slot.array[...] = 1
        assert victim.recv() == 1
        with pytest.raises(WaitTimeout, match="others of the group"):
            reader.get(timeout=0.02)
        victim.kill()
        assert [taken.number for taken in reader.slots()] == [1]


def test_groups_are_of_block_readers(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with pytest.raises(InvalidArgument, match="group"):
        channel.reader(policy="latest", group="g")


# -- streams


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


# -- names, sessions


def test_names(case: Case, session: Session) -> None:
    made = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with pytest.raises(NameInUse):
        session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    same_one = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device, exist_ok=True)
    assert same_one.incarnation == made.incarnation
    with pytest.raises(NameInUse):
        session.create_channel("frames", shape=SHAPE, dtype="int8", device=case.device, exist_ok=True)
    with pytest.raises(NotFound):
        session.open_channel("nothing", timeout=0.02)
    with pytest.raises(InvalidArgument):
        session.create_channel("one", shape=SHAPE, dtype="int32", depth=1, device=case.device)
    with pytest.raises(InvalidArgument):
        made.reader(policy="newest")  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["broker", "session"])
def test_memory_of_either_owner(case: Case, session: Session, spawn: Spawn, memory: Any) -> None:
    session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device, memory=memory)
    reader = spawn(read_all)
    reader.recv()
    spawn(write_items, 10).join()
    assert reader.join() == list(range(1, 11))


def test_closing_the_session_wakes_who_waits(case: Case, session: Session) -> None:
    other = ipcsync.connect()
    session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device=case.device)
    reader = other.open_channel("frames").reader()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            reader.get(timeout=None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    other.close()
    thread.join(20)
    assert isinstance(raised[0], SessionClosed | InvalidState)


def test_a_reader_may_be_used_by_many_threads(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    numbers: list[int] = []
    with channel.reader() as reader, channel.writer() as writer:

        def take() -> None:
            for slot in reader.slots():
                assert same(slot.array, slot.number)
                numbers.append(slot.number)

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            with writer.slot() as slot:
                slot.array[...] = slot.number
        writer.close()
        for thread in threads:
            thread.join(20)
    assert sorted(numbers) == list(range(1, 61))


def test_the_bench_is_empty_afterwards(case: Case, session: Session) -> None:
    """A channel whose creator ended and whom nobody holds leaves nothing in the runtime directory."""
    with ipcsync.connect() as other:
        other.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    wait_until(
        lambda: not [p for p in os.listdir(session.runtime) if p.startswith(("ctl-", "mem-", "smem-"))],
        "the removal of the channel's files",
    )


def test_handles_of_one_channel_close_one_by_one(case: Case, session: Session) -> None:
    made = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    again = session.open_channel("frames")
    made.close()
    made.close()
    with again.reader() as reader, again.writer() as writer:
        with writer.slot() as slot:
            slot.array[...] = 3
        with reader.get() as taken:
            assert same(taken.array, 3)
    with pytest.raises(InvalidState):
        made.reader()
