"""Reader groups: each item to one member, and what a dead member held to another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ipcsync import linux, ring
from ipcsync.groups import SharedTurn
from ipcsync.ledger import FOREVER, Cell, Ledger
from ipcsync.turns import Choice, publish
from ipcsync.wire import ChannelSpec, FieldSpec


class Rig:
    """A channel of three buffers without processes: a writer's choice, and members of one group."""

    def __init__(self, folder: Path, *, redeliver: bool = True) -> None:
        linux.membarrier_register()
        self.paths = [folder / f"ipcsync-t-{uuid4().hex}" for _ in range(2)]
        self.ledger = Ledger.create(self.paths[0], sessions=8, events=8)
        self.ledger.open_cell(0, 1)
        spec = ChannelSpec((FieldSpec("array", (1,), "int8"),), 256, 3, 4, redeliver=redeliver)
        self.control = ring.create(self.paths[1], spec, cell=0, incarnation=1)
        self.choice = Choice(self.control)

    @property
    def issued(self) -> int:
        return int(self.ledger.words[self.ledger.cell(0) + Cell.ISSUED])

    def write(self) -> bool:
        found = self.choice.pick()
        if found is None:
            return False
        number = self.issued + 1
        publish(self.control, found[0], number, 1)
        self.ledger.words[self.ledger.cell(0) + Cell.ISSUED] = number
        self.choice.keep(found[0], number)
        return True

    def join(self) -> SharedTurn:
        cell = ring.free_reader(self.control)
        assert cell is not None
        return SharedTurn(self.control, cell, ring.join(self.control, self.ledger, cell, block=cell, group=9))

    def take(self, member: SharedTurn) -> tuple[int, int] | None:
        return member.take(self.issued, FOREVER) if member.ready(self.issued, FOREVER) else None

    def release(self, member: SharedTurn, taken: tuple[int, int] | None) -> int:
        assert taken is not None
        number, b = taken
        self.control.words[member.done + b] = number
        member.release(b, number)
        return number

    def kill(self, member: SharedTurn) -> None:
        for _ in range(2):
            ring.drop(self.control, member.cell)
        ring.leave(self.control, member.cell)


Rigs = Callable[..., Rig]


@pytest.fixture
def rig() -> Iterator[Rigs]:
    made: list[Rig] = []

    def make(**options: bool) -> Rig:
        made.append(Rig(Path("/dev/shm"), **options))
        return made[-1]

    yield make
    for each in made:
        for path in each.paths:
            path.unlink(missing_ok=True)


def test_each_item_goes_to_one_member(rig: Rigs) -> None:
    r = rig()
    members = [r.join(), r.join()]
    got = []
    for i in range(12):
        assert r.write()
        got.append(r.release(members[i % 3 % 2], r.take(members[i % 3 % 2])))
        assert r.take(members[0]) is r.take(members[1]) is None
    assert got == list(range(1, 13))


def test_the_writer_waits_for_what_no_member_took(rig: Rigs) -> None:
    r = rig()
    one, _ = r.join(), r.join()
    assert [r.write() for _ in range(4)] == [True, True, True, False]
    held = [r.take(one) for _ in range(3)]
    assert not r.write()
    r.release(one, held[1])
    assert r.write()
    assert r.take(one) == (4, (held[1] or (0, 0))[1])


def test_what_a_dead_member_held_goes_to_another(rig: Rigs) -> None:
    r = rig()
    one, two = r.join(), r.join()
    r.write()
    held = r.take(one)
    r.kill(one)
    for _ in range(2):
        assert r.write()
    assert not r.write(), "the dead member's item was overwritten"
    assert ring.free_reader(r.control) != one.cell, "its cell says what it held, until another has it"
    assert r.take(two) == held
    assert ring.free_reader(r.control) == one.cell
    assert r.release(two, held) == 1
    for number in (2, 3):
        assert r.release(two, r.take(two)) == number
    assert r.take(two) is None
    assert r.write()


def test_it_goes_on_when_the_next_one_dies_too(rig: Rigs) -> None:
    r = rig()
    members = [r.join() for _ in range(3)]
    r.write()
    held = r.take(members[0])
    r.kill(members[0])
    assert r.take(members[1]) == held
    assert r.take(members[2]) is None
    r.kill(members[1])
    assert r.take(members[2]) == held
    r.release(members[2], held)
    assert r.take(members[2]) is None


def test_what_dead_ones_held_is_given_again_in_order(rig: Rigs) -> None:
    r = rig()
    one, two = r.join(), r.join()
    for _ in range(3):
        assert r.write()
    held = [r.take(one) for _ in range(3)]
    r.release(one, held[0])
    assert r.write()  # in the first buffer, which so holds the newest of what `one` has
    assert r.take(one) is not None
    r.kill(one)
    assert [found[0] for found in (r.take(two), r.take(two), r.take(two)) if found] == [2, 3, 4]


def test_what_it_had_released_is_not_given_again(rig: Rigs) -> None:
    r = rig()
    one, two = r.join(), r.join()
    r.write()
    r.release(one, r.take(one))
    r.kill(one)
    assert r.take(two) is None
    for _ in range(3):
        assert r.write()


def test_a_channel_may_drop_it_instead(rig: Rigs) -> None:
    r = rig(redeliver=False)
    one, two = r.join(), r.join()
    r.write()
    assert r.take(one) is not None
    r.kill(one)
    assert r.take(two) is None
    assert not two.peers_hold()
    assert [r.write() for _ in range(3)] == [True, True, True]


def test_nobody_holds_up_the_writer_once_all_are_dead(rig: Rigs) -> None:
    r = rig()
    one, two = r.join(), r.join()
    for _ in range(3):
        r.write()
    r.take(one)
    r.kill(one)
    r.take(two)
    r.kill(two)
    assert [r.write() for _ in range(4)] == [True] * 4
    fresh = r.join()
    r.write()
    assert r.take(fresh) is not None
    assert r.take(fresh) is None


def test_a_member_that_stopped_is_no_member(rig: Rigs) -> None:
    r = rig()
    one = r.join()
    one.stop()
    assert [r.write() for _ in range(5)] == [True] * 5


def test_a_stopped_process_keeps_what_it_holds(rig: Rigs) -> None:
    r = rig()
    one, two = r.join(), r.join()
    r.write()
    held = r.take(one)
    ring.retire(r.control, one.cell)
    assert r.take(two) is None
    assert two.peers_hold()
    r.kill(one)
    assert r.take(two) == held


def test_a_condemned_item_of_a_dead_member_is_nobodys(rig: Rigs) -> None:
    r = rig()
    one, two = r.join(), r.join()
    r.write()
    r.take(one)
    ring.new_epoch(r.control, cell=0, incarnation=1, base=1, first_bad=1)
    r.kill(one)
    assert r.take(two) is None
    assert not two.peers_hold()
    assert [r.write() for _ in range(3)] == [True] * 3


def test_a_members_take_that_failed_comes_back_to_it(rig: Rigs) -> None:
    r = rig()
    one, two = r.join(), r.join()
    r.write()
    taken = r.take(one)
    assert taken is not None
    one.undo(taken[1], taken[0])
    assert r.take(two) is None
    assert r.take(one) == taken


def test_threads_share_a_group_too(rig: Rigs) -> None:
    r = rig()
    members = [r.join() for _ in range(4)]
    got: list[int] = []

    def work(member: SharedTurn) -> None:
        while len(got) < 300:
            taken = r.take(member)
            if taken is not None:
                got.append(r.release(member, taken))

    threads = [threading.Thread(target=work, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    while r.issued < 300:
        r.write()
    for thread in threads:
        thread.join(20)
    assert sorted(got) == list(range(1, 301))
