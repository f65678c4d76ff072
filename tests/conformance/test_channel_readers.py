"""Layer 3, channels: readers come, go, are slow, share the items in groups, and die."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import itertools
import os
import signal

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import InvalidArgument, WaitTimeout

from ..harness import Peer
from .cases import Case, case  # noqa: F401
from .items import SHAPE, Spawn, read_all, same, write_items

JOINS = int(os.environ.get("IPCSYNC_JOINS", "40"))  # how often each of two readers joins and leaves


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


def test_a_release_on_what_is_no_stream_leaves_the_slot_held(case: Case, session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device=case.device)
    with channel.reader() as reader, channel.writer() as writer:
        for _ in range(2):
            with writer.slot() as slot:
                slot.array[...] = slot.number
        item = reader.get()
        with pytest.raises(InvalidArgument):
            item.release("no stream")
        with reader.get() as other:
            assert same(other.array, 2)
        assert same(item.array, 1)
        item.release()
        for _ in range(2):
            with writer.slot() as slot:
                slot.array[...] = slot.number
        assert [reader.get().number for _ in range(2)] == [3, 4]
