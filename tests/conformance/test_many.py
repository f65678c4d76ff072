"""Waiting for many at once: ``session.select``, and coroutines, in real processes."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync import Reader, Session
from ipcsync.errors import InvalidArgument, PeerDied, WaitTimeout

from ..harness import Child, Peer, wait_until
from .cases import Case, case  # noqa: F401
from .items import SHAPE, fail_after, hang_in_slot, same, write_items

Spawn = Callable[..., Child]


def write_some(peer: Peer, name: str, count: int) -> None:
    with ipcsync.connect() as session, session.open_channel(name).writer() as writer:
        for _ in range(count):
            peer.recv()
            with writer.slot() as slot:
                slot.array[...] = slot.number
        peer.recv()


def test_one_worker_serves_many_channels(case: Case, session: Session, spawn: Spawn) -> None:
    names = ["a", "b", "c"]
    readers = {
        name: session.create_channel(name, shape=SHAPE, dtype="int32", device=case.device).reader() for name in names
    }
    children = {name: spawn(write_some, name, 5) for name in names}
    assert session.select(list(readers.values()), timeout=0.02) == []
    for number in range(1, 6):
        for name in names:
            children[name].send()
            assert session.select(list(readers.values())) == [readers[name]]
            with readers[name].get() as slot:
                assert slot.number == number
                assert same(slot.array, number)
    for child in children.values():
        child.send()
    left = list(readers.values())
    while left:  # a stream that ended is ready: get() says so
        for reader in session.select(left):
            assert list(reader.slots()) == []
            left.remove(reader)
    with pytest.raises(InvalidArgument):
        session.select([])


def test_select_sees_a_writers_death(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader() as reader:
        child = spawn(hang_in_slot, 0)
        child.recv()
        killer = threading.Timer(0.1, child.kill)
        killer.start()
        assert session.select([reader], timeout=None) == [reader]
        with pytest.raises(PeerDied):
            reader.get()
        killer.join()


def test_select_waits_for_the_next_writers_items(case: Case, session: Session, spawn: Spawn) -> None:
    """A reader that waits for whoever takes over is not ready when somebody did, but when that one wrote something."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader(on_writer_death="wait") as reader:
        victim = spawn(hang_in_slot, 0)
        victim.recv()
        victim.kill()
        wait_until(lambda: reader._epochs.bad == 1, "the verdict")
        assert session.select([reader], timeout=0.05) == []
        with channel.writer() as writer:
            assert session.select([reader], timeout=0.05) == []
            with writer.slot() as slot:
                slot.array[...] = 1
            assert session.select([reader]) == [reader]
            with reader.get(timeout=0) as slot:
                assert slot.number == 1


async def ticks(stop: asyncio.Event) -> int:
    count = 0
    while not stop.is_set():
        await asyncio.sleep(0)
        count += 1
    return count


def test_coroutines_read_while_the_loop_goes_on(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)

    async def main() -> tuple[list[int], int]:
        stop = asyncio.Event()
        ticking = asyncio.create_task(ticks(stop))
        numbers = []
        with channel.reader() as reader:
            child = spawn(write_items, 50)
            async for slot in reader.slots_async():
                assert same(slot.array, slot.number)
                numbers.append(slot.number)
        stop.set()
        child.join()
        return numbers, await ticking

    numbers, count = asyncio.run(main())
    assert numbers == list(range(1, 51))
    assert count > 10


def test_a_cancelled_wait_takes_nothing_and_leaves_nothing(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)
    with channel.reader() as reader, channel.writer() as writer:

        async def first() -> int:
            async for slot in reader.slots_async():
                return slot.number
            raise AssertionError("no item")

        async def main() -> int:
            for _ in range(20):
                waiting = asyncio.create_task(first())
                await asyncio.sleep(0.002)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            with writer.slot() as slot:
                slot.array[...] = 1
            return await first()

        assert asyncio.run(main()) == 1
        assert session.waiter._wishes == []


def test_coroutines_hear_of_ends(case: Case, session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", device=case.device)

    async def read(reader: Reader, timeout: float | None) -> list[int]:
        return [slot.number async for slot in reader.slots_async(timeout=timeout)]

    with channel.reader() as reader:
        with pytest.raises(WaitTimeout, match="item of 'frames'"):
            asyncio.run(read(reader, 0.02))
        child = spawn(fail_after, 0)
        with pytest.raises(PeerDied, match="unlucky"):
            asyncio.run(read(reader, None))
        child.join()


def test_many_coroutines_share_one_waiter(case: Case, session: Session) -> None:
    events = [session.create_event(f"e{i}", device=case.device) for i in range(20)]

    async def main() -> None:
        waits = [asyncio.create_task(event.synchronize_async()) for event in events]
        await asyncio.sleep(0.01)
        assert not any(wait.done() for wait in waits)
        assert sum(thread.name == "ipcsync-waiter" for thread in threading.enumerate()) == 1
        for event in events:
            event.record()
        await asyncio.gather(*waits)
        await events[0].synchronize_async(round=1)
        with pytest.raises(WaitTimeout):
            await events[0].synchronize_async(round=2, timeout=0.02)

    asyncio.run(main())
