"""Reader groups whose members hold an item when the stream ends: none waits for what another waits for."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import EndOfStream, InvalidState, WaitTimeout

from ..harness import TIMEOUT, Child, Gate, Peer, wait_until
from .cases import Case, case  # noqa: F401
from .items import SHAPE

Spawn = Callable[..., Child]


def holds(peer: Peer, asks: int) -> str:
    """Takes an item, and asks for the next `asks` times without releasing it; then in order, to the end."""
    with ipcsync.connect() as session, session.open_channel("frames").reader(group="g") as reader:
        peer.send("attached")
        slot = reader.get()
        peer.send(slot.number)
        peer.recv()
        for _ in range(asks):
            with pytest.raises(InvalidState, match=r"release\(\) that, then get\(\) again"):
                reader.get(timeout=None)
        peer.send("told")
        peer.recv()
        slot.release()
        try:
            with reader.get(timeout=None) as other:
                return f"got {other.number}"
        except EndOfStream:
            return "end"


def start(session: Session, case: Case, spawn: Spawn, *asks: int) -> list[Child]:
    """Members that each hold an item of a stream that has ended."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    children = [spawn(holds, count) for count in asks]
    for child in children:
        assert child.recv() == "attached"
    with channel.writer() as writer:
        for _ in asks:
            with writer.slot() as slot:
                slot.array[...] = slot.number
    assert sorted(child.recv() for child in children) == list(range(1, len(asks) + 1))
    return children


def test_members_that_hold_an_item_at_the_end_do_not_wait_for_each_other(
    case: Case, session: Session, spawn: Spawn
) -> None:
    children = start(session, case, spawn, 2, 2, 0)
    for child in children:
        child.send()
    for child in children:
        assert child.recv() == "told"
    for child in children:
        child.send()
    assert [child.join() for child in children] == ["end"] * 3


@pytest.mark.kills
def test_and_still_get_what_the_other_held_when_it_dies(case: Case, session: Session, spawn: Spawn) -> None:
    first, second = start(session, case, spawn, 1, 1)
    for child in (first, second):
        child.send()
        assert child.recv() == "told"
    second.send()  # it releases, and waits for the first
    first.kill()
    assert second.join().startswith("got ")


def test_one_that_waits_when_the_stream_ends_is_told_then(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    told: list[int] = []
    both = threading.Barrier(3, timeout=TIMEOUT)

    def ask(reader: ipcsync.Reader) -> None:
        slot = reader.get(timeout=TIMEOUT)
        both.wait()
        try:
            reader.get(timeout=None)
        except InvalidState:
            told.append(slot.number)
        except EndOfStream:
            pass  # the other one has released its item by now
        slot.release()

    with channel.reader(group="g") as one, channel.reader(group="g") as two:
        threads = [threading.Thread(target=ask, args=(reader,)) for reader in (one, two)]
        for thread in threads:
            thread.start()
        with channel.writer() as writer:
            for _ in threads:
                with writer.slot() as slot:
                    slot.array[...] = slot.number
            both.wait()
        threads[0].join(TIMEOUT)
        threads[1].join(TIMEOUT)
        assert not any(thread.is_alive() for thread in threads)
        assert told
        for reader in (one, two):
            with pytest.raises(EndOfStream):
                reader.get()


def test_it_can_be_selected_and_says_so_at_once(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device)
    with channel.reader(group="g") as one, channel.reader(group="g") as two:
        with channel.writer() as writer:
            for _ in range(2):
                with writer.slot() as slot:
                    slot.array[...] = slot.number
        mine, other = one.get(), two.get()
        assert session.select([one], timeout=None) == [one]
        with pytest.raises(InvalidState):
            one.get(timeout=0)
        mine.release()
        assert session.select([one], timeout=0.05) == []
        with pytest.raises(WaitTimeout, match=r"release\(\) them there, or close\(\) those readers"):
            one.get(timeout=0.05)
        other.release()
        assert session.select([one], timeout=None) == [one]
        with pytest.raises(EndOfStream):
            one.get(timeout=0)


@pytest.mark.parametrize("how", ["close", "collected"])
def test_what_a_member_took_and_never_got_goes_to_another(session: Session, how: str) -> None:
    """Its ``get()`` timed out behind the writer's stream: its user has not seen the item."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device="cpu")
    stream, gate = ipcsync.Stream("cpu"), Gate()
    with channel.writer() as writer, channel.reader(group="g") as two:
        one = channel.reader(group="g")
        stream.enqueue(gate.hold)
        with writer.slot(stream):
            pass
        with writer.slot(stream):
            pass
        with pytest.raises(WaitTimeout):
            one.get(timeout=0.05)
        if how == "close":
            one.close()
        else:
            with pytest.warns(ResourceWarning):
                del one
        wait_until(lambda: channel.readers == 1, "its end")
        gate.open()
        assert [two.get().number for _ in range(2)] == [1, 2]
        assert channel.reader(group="g").close() is None  # its place can be had again


@pytest.mark.parametrize("last", [False, True])
def test_it_holds_nobody_up_where_nobody_else_is(session: Session, last: bool) -> None:
    channel = session.create_channel(
        "frames", shape=SHAPE, dtype="int32", depth=2, device="cpu", redeliver=last, max_readers=2
    )
    stream, gate = ipcsync.Stream("cpu"), Gate()
    with channel.writer() as writer:
        one = channel.reader(group="g")
        stream.enqueue(gate.hold)
        with writer.slot(stream):
            pass
        with pytest.raises(WaitTimeout):
            one.get(timeout=0.05)
        one.close()
        gate.open()
        for _ in range(5):
            with writer.slot():
                pass
        readers = [channel.reader(group="g") for _ in range(2)]
        for reader in readers:
            reader.close()


def test_where_nothing_is_given_again_the_end_is_the_end(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=4, device=case.device, redeliver=False)
    with channel.reader(group="g") as one, channel.reader(group="g") as two:
        with channel.writer() as writer:
            for _ in range(2):
                with writer.slot() as slot:
                    slot.array[...] = slot.number
        held = [one.get(), two.get()]
        for reader in (one, two):
            with pytest.raises(EndOfStream):
                reader.get(timeout=None)
        assert [slot.number for slot in held] == [1, 2]
