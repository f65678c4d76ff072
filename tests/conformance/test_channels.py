"""Layer 3, channels: items, their meta and arrays, names and sessions; in real processes, with every value checked."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import numpy
import pytest

import ipcsync
from ipcsync import Field, Session
from ipcsync.errors import InvalidArgument, InvalidState, MetaTooLarge, NameInUse, NotFound, SessionClosed, WaitTimeout

from ..harness import wait_until
from .cases import Case, case  # noqa: F401
from .items import SHAPE, Spawn, host, read_all, same, write_items


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
