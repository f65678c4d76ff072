"""Whose turn a buffer is: writer and readers as a model, every order of their steps, joins, deaths and takeovers.

One process plays them all, step by step, on a real control file. A shadow of the ring knows which item's data lies in
each buffer: a reader that holds an item must find it untouched until it lets go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipcsync import linux, ring
from ipcsync.groups import SharedTurn
from ipcsync.ledger import FOREVER, Cell, Ledger
from ipcsync.turns import Choice, LatestTurn, Turn, publish
from ipcsync.wire import ArraySpec, ChannelSpec, FieldSpec

SPEC = FieldSpec("array", (4,), "uint8")


def spec(depth: int = 3, max_readers: int = 4) -> ChannelSpec:
    return ChannelSpec((SPEC,), 256, depth, max_readers)


LATEST, SHARED = "latest", "shared"


@dataclass(eq=False)
class Attached:
    turn: Turn
    kind: str
    first: int
    got: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)  # item -> buffer
    undone: dict[int, int] = field(default_factory=dict)  # released by the host, not yet on the device: buffer -> item


class Ring(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        linux.membarrier_register()
        folder = Path("/dev/shm")
        self.paths = [folder / f"ipcsync-t-{uuid4().hex}-{what}" for what in ("ledger", "ctl")]

    @initialize(depth=st.integers(2, 4))
    def begin(self, depth: int) -> None:
        self.ledger = Ledger.create(self.paths[0], sessions=4, events=128)
        self.ledger.open_cell(0, 1)
        self.control = ring.create(self.paths[1], spec(depth), cell=0, incarnation=1)
        self.cell, self.epoch = 0, 1
        self.choice = Choice(self.control)
        self.data: dict[int, int] = {}  # buffer -> the item whose bytes lie in it; -1 while it is written
        self.open: list[int] = []
        self.readers: list[Attached] = []
        self.orphans: dict[int, int] = {}  # what dead members of the group held: item -> buffer
        self.shared: set[int] = set()  # what the group's members took

    @property
    def issued(self) -> int:
        return int(self.ledger.words[self.ledger.cell(self.cell) + Cell.ISSUED])

    def teardown(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)

    # -- the writer

    @rule()
    def open_slot(self) -> None:
        found = self.choice.pick()
        if found is None:
            for b in set(range(self.control.depth)) - set(self.open) - set(self.orphans.values()):
                assert any(self.wants(a, b) for a in self.readers), f"nobody wants what is in buffer {b}"
            return
        b, waits = found
        for a in self.readers:
            if b in a.undone:
                word = a.turn.done + b
                assert (word, a.undone[b]) in waits, "the writer's stream would run over a reader's device work"
        self.data[b] = -1
        self.open.append(b)

    def wants(self, a: Attached, b: int) -> bool:
        if b in a.held.values():
            return True
        return a.kind != LATEST and self.data[b] >= a.turn.next and self.data[b] not in a.lost

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3))
    def publish_slot(self, which: int) -> None:
        b = self.open.pop(which % len(self.open))
        number = self.issued + 1
        publish(self.control, b, number, self.epoch)
        at = self.ledger.cell(self.cell)
        self.ledger.words[at + Cell.INTENT] = self.ledger.words[at + Cell.ISSUED] = number
        self.choice.keep(b, number)
        self.data[b] = number

    @precondition(lambda self: self.open)
    @rule()
    def discard_slot(self) -> None:
        self.choice.put_back(self.open.pop())

    @rule(incomplete=st.integers(0, 2))
    def writer_dies_and_another_comes(self, incomplete: int) -> None:
        """Its last items were not complete: readers may hold them, or have let them go."""
        words, at = self.ledger.words, self.ledger.cell(self.cell)
        line = self.control.epoch(self.epoch)
        bad = max(self.issued - incomplete, self.control.words[line + ring.Epoch.BASE]) + 1
        words[at + Cell.VERDICT] = bad
        self.cell += 1
        base = max(words[at + Cell.INTENT], ring.highest_item(self.control))
        self.ledger.open_cell(self.cell, 1, base=base)
        self.epoch = ring.new_epoch(self.control, cell=self.cell, incarnation=1, base=base, first_bad=bad)
        self.choice = Choice(self.control)
        self.open = []
        for a in self.readers:
            a.lost |= set(range(bad, base + 1))

    # -- readers

    @precondition(lambda self: ring.free_reader(self.control) is not None)
    @rule(kind=st.sampled_from(["block", "latest", "shared"]), oldest=st.booleans())
    def join(self, kind: str, oldest: bool) -> None:
        cell = ring.free_reader(self.control)
        assert cell is not None
        joins_others = kind == SHARED and bool(self.members)
        first = ring.join(
            self.control,
            self.ledger,
            cell,
            block=cell,
            policy="latest" if kind == LATEST else "block",
            start="oldest" if oldest else "next",
            group=7 if kind == SHARED else 0,
        )
        assert first <= self.issued + 1
        if not oldest:
            assert first == self.issued + 1
        turn = {"block": Turn, "latest": LatestTurn, "shared": SharedTurn}[kind](self.control, cell, first)
        lost: set[int] = set()
        if joins_others:
            first, lost = self.members[0].first, self.members[0].lost
        elif kind == SHARED:
            self.shared = set()
        for number in range(turn.next, self.issued + 1):
            assert number in self.data.values() or number in lost, "a joiner was promised an item that is gone"
        self.readers.append(Attached(turn, kind, first, lost=set(lost)))

    @property
    def members(self) -> list[Attached]:
        return [a for a in self.readers if a.kind == SHARED]

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 3))
    def take(self, which: int) -> None:
        a = self.readers[which % len(self.readers)]
        while a.turn.next in a.lost:  # it waits for the next writer, and goes on with its first item
            a.turn.move_to(a.turn.next + 1)
        if not a.turn.ready(self.issued, FOREVER):
            return
        taken = a.turn.take(self.issued, FOREVER)
        if taken is None:
            assert a.kind == LATEST
            return
        number, b = taken
        assert self.data[b] == number
        assert a.turn.words[a.turn.at + ring.Reader.STATE] == ring.Reader.ACTIVE
        a.held[number] = b
        if a.kind == SHARED:
            assert number not in self.shared or self.orphans.pop(number) == b, "two members have one item"
            self.shared.add(number)

    @precondition(lambda self: any(a.held for a in self.readers))
    @rule(which=st.integers(0, 3), item=st.integers(0, 9), later=st.booleans())
    def release(self, which: int, item: int, later: bool) -> None:
        holders = [a for a in self.readers if a.held]
        a = holders[which % len(holders)]
        number = sorted(a.held)[item % len(a.held)]
        b = a.held.pop(number)
        if later:
            a.undone[b] = number
        else:
            self.control.words[a.turn.done + b] = number
        a.turn.release(b, number)
        a.got.append(number)

    @precondition(lambda self: any(a.undone for a in self.readers))
    @rule(which=st.integers(0, 3))
    def device_gets_there(self, which: int) -> None:
        waiting = [a for a in self.readers if a.undone]
        a = waiting[which % len(waiting)]
        b, number = a.undone.popitem()
        self.control.words[a.turn.done + b] = number

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 3), dies=st.booleans())
    def leave(self, which: int, dies: bool) -> None:
        a = self.readers[which % len(self.readers)]
        self.readers.remove(a)
        if dies:
            if a.kind == SHARED:
                self.orphans.update(a.held)
            ring.drop(self.control, a.turn.cell)
            ring.drop(self.control, a.turn.cell)
            ring.leave(self.control, a.turn.cell)
        else:
            for number, b in a.held.items():
                self.control.words[a.turn.done + b] = number
                a.turn.release(b, number)
            for b, number in a.undone.items():
                self.control.words[a.turn.done + b] = number
            a.turn.stop()
            ring.leave(self.control, a.turn.cell)
        a.turn.close()
        if not self.members:
            self.orphans = {}

    # -- what must hold at any moment

    @invariant()
    def held_is_untouched(self) -> None:
        for a in getattr(self, "readers", ()):
            for number, b in a.held.items():
                assert self.data[b] == number, f"item {number} was overwritten while held"
        for number, b in getattr(self, "orphans", {}).items():
            assert self.data[b] == number or self.void(number, b), f"item {number} of a dead member was overwritten"

    def void(self, number: int, b: int) -> bool:
        return any(number in a.lost for a in self.members)

    @invariant()
    def every_item_once(self) -> None:
        for a in getattr(self, "readers", ()):
            seen = sorted(n for n in (*a.got, *a.held) if n not in a.lost)
            assert len(seen) == len(set(seen))
            if a.kind == SHARED:
                due = [n for n in range(a.first, a.turn.next) if n not in a.lost]
                assert sorted(n for n in self.shared if n not in a.lost) == due
            elif a.kind == "block":
                due = [n for n in range(a.first, a.turn.next) if n not in a.lost]
                assert seen == due
            if a.kind != LATEST:
                for number in range(a.turn.next, self.issued + 1):
                    assert number in a.lost or number in self.data.values(), "an item that is due is gone"


TestRing = pytest.mark.watchdog(300)(Ring.TestCase)
TestRing.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_dead_writers_last_item_hides_no_reader_whose_device_is_still_at_the_one_before(stopped: bool) -> None:
    """What the model found: the dead writer's stream was to wait for the reader's; the next writer's has to as well."""
    model = Ring()
    try:
        model.begin(depth=2)
        model.join(kind="block", oldest=False)
        for _ in range(2):
            model.open_slot()
            model.publish_slot(which=0)
        model.take(which=0)
        model.release(which=0, item=0, later=True)
        model.open_slot()  # behind the reader's device, on the writer's stream
        model.publish_slot(which=0)
        model.writer_dies_and_another_comes(incomplete=1)
        if stopped:  # its device may never get there: no stream is made to wait for it
            ring.retire(model.control, 0)
            assert model.choice.pick() is not None
            assert model.choice.pick() is None
        else:
            model.open_slot()
    finally:
        model.teardown()


# -- single rules, where the model has no eye for them


@pytest.fixture
def control() -> Iterator[tuple[ring.Control, Ledger]]:
    linux.membarrier_register()
    paths = [Path("/dev/shm") / f"ipcsync-t-{uuid4().hex}" for _ in range(2)]
    try:
        ledger = Ledger.create(paths[0], sessions=4, events=8)
        ledger.open_cell(0, 1)
        yield ring.create(paths[1], spec(2), cell=0, incarnation=1), ledger
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def write(control: ring.Control, ledger: Ledger, choice: Choice) -> int:
    found = choice.pick()
    assert found is not None
    number = int(ledger.words[ledger.cell(0) + Cell.ISSUED]) + 1
    publish(control, found[0], number, 1)
    ledger.words[ledger.cell(0) + Cell.ISSUED] = number
    choice.keep(found[0], number)
    return number


def take(turn: Turn, number: int) -> int:
    turn.next = number
    taken = turn.take(number, FOREVER)
    assert taken is not None
    return taken[1]


def test_a_retired_reader_keeps_what_it_holds_and_gets_nothing_more(control: tuple[ring.Control, Ledger]) -> None:
    ctl, ledger = control
    choice = Choice(ctl)
    turn = Turn(ctl, 0, ring.join(ctl, ledger, 0, block=0))
    write(ctl, ledger, choice)
    held = take(turn, 1)
    write(ctl, ledger, choice)
    assert choice.pick() is None
    ring.retire(ctl, 0)
    for _ in range(5):  # in the other buffer, over and over
        write(ctl, ledger, choice)
    assert choice.items[held] == 1
    take(turn, 7)
    assert turn.words[turn.at + ring.Reader.STATE] == ring.Reader.RETIRED
    ring.drop(ctl, 0)
    write(ctl, ledger, choice)
    write(ctl, ledger, choice)
    assert 1 not in choice.items


def test_no_stream_is_made_to_wait_for_a_retired_readers_device(control: tuple[ring.Control, Ledger]) -> None:
    ctl, ledger = control
    choice = Choice(ctl)
    turn = Turn(ctl, 0, ring.join(ctl, ledger, 0, block=0))
    for number in (1, 2):
        write(ctl, ledger, choice)
        turn.release(take(turn, number), number)  # on the host; its device never gets there
    ring.retire(ctl, 0)
    assert choice.pick() is None
    ring.drop(ctl, 0)
    assert choice.pick() is not None


def test_a_wait_on_a_left_readers_word_survives_its_next_owner(control: tuple[ring.Control, Ledger]) -> None:
    ctl, ledger = control
    choice = Choice(ctl)
    turn = Turn(ctl, 0, ring.join(ctl, ledger, 0, block=0))
    for number in (1, 2):
        write(ctl, ledger, choice)
        turn.release(take(turn, number), number)
    found = choice.pick()
    assert found is not None
    ((word, item),) = found[1]  # put on the writer's stream, which is slow to get there
    ring.drop(ctl, 0)
    ring.leave(ctl, 0)
    ring.join(ctl, ledger, 0, block=1, start="oldest")
    assert item <= ctl.words[word] < FOREVER


def test_a_reader_known_to_be_dead_holds_nothing_until_the_roster_changes(control: tuple[ring.Control, Ledger]) -> None:
    ctl, ledger = control
    choice = Choice(ctl)
    ring.join(ctl, ledger, 0, block=3)
    write(ctl, ledger, choice)
    write(ctl, ledger, choice)
    assert choice.pick() is None
    assert choice.blockers() == {3}
    choice.dead = {3}
    write(ctl, ledger, choice)
    ring.join(ctl, ledger, 1, block=3)  # the block's next owner is not dead
    assert not choice.dead or choice.pick() is None


def test_a_reader_that_stopped_holds_nobody_up(control: tuple[ring.Control, Ledger]) -> None:
    ctl, ledger = control
    choice = Choice(ctl)
    turn = Turn(ctl, 0, ring.join(ctl, ledger, 0, block=0))
    write(ctl, ledger, choice)
    held = take(turn, 1)
    write(ctl, ledger, choice)
    turn.stop()
    for _ in range(4):
        write(ctl, ledger, choice)
    assert choice.items[held] == 1, "what it holds is still its own"


def test_a_control_file_of_another_layout_is_refused(control: tuple[ring.Control, Ledger]) -> None:
    from ipcsync.errors import ProtocolMismatch

    ctl, _ = control
    ctl.words[ring.Head.VERSION] = 99
    with pytest.raises(ProtocolMismatch, match="layout 99"):
        ring.open_control(ctl.region.path)


def test_an_arrays_reader_cells_go_on_counting_over_their_owners() -> None:
    path = Path("/dev/shm") / f"ipcsync-t-{uuid4().hex}"
    try:
        ctl = ring.create_array(path, ArraySpec((SPEC,)))
        assert ring.free_reader(ctl) == 0
        ring.join_array(ctl, 0, block=2)
        at = ctl.reader(0)
        ctl.words[at + ring.Reader.BEGUN] = 5
        ring.drop(ctl, 0)
        assert ctl.words[at + ring.Reader.DONE] == ctl.words[at + ring.Reader.RELEASED] == FOREVER
        ring.leave(ctl, 0)
        ring.join_array(ctl, 0, block=3)
        assert [ctl.words[at + w] for w in (ring.Reader.BEGUN, ring.Reader.RELEASED, ring.Reader.DONE)] == [5, 5, 5]
    finally:
        path.unlink(missing_ok=True)


def test_what_was_dropped_under_its_hands_counts_with_what_it_passed_over(
    control: tuple[ring.Control, Ledger],
) -> None:
    ctl, ledger = control
    choice = Choice(ctl)
    turn = LatestTurn(ctl, 0, ring.join(ctl, ledger, 0, block=0, policy="latest"))
    for _ in range(4):
        write(ctl, ledger, choice)
    ctl.words[ring.Head.DROPPED] = 4  # the writer was faster, between the look and the take
    assert turn.ready(4, FOREVER)
    assert turn.take(4, FOREVER) is None
    assert (turn.next, turn.skipped) == (5, 4)
    write(ctl, ledger, choice)
    taken = turn.take(5, FOREVER)
    assert taken is not None
    assert (taken[0], turn.skipped) == (5, 4)


def full(control: tuple[ring.Control, Ledger], choice: Choice) -> Turn:
    """A ring that one reader fills, holding both items; and a writer that has looked twice."""
    ctl, ledger = control
    turn = Turn(ctl, 0, ring.join(ctl, ledger, 0, block=0))
    for number in (1, 2):
        write(ctl, ledger, choice)
        take(turn, number)
    assert choice.pick() is None
    assert choice.pick() is None
    return turn


def test_who_waits_for_room_does_not_look_through_the_ring_again(
    control: tuple[ring.Control, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Choice(control[0])
    turn = full(control, choice)
    looks: list[int] = []
    free = choice._free
    monkeypatch.setattr(choice, "_free", lambda b, *rest: looks.append(b) or free(b, *rest))
    for _ in range(10):
        assert choice.pick() is None
    assert not looks
    turn.release(choice.order[1], 2)
    found = choice.pick()
    assert found is not None
    assert looks


def gone(turn: Turn) -> None:
    ring.drop(turn.control, 0)
    ring.leave(turn.control, 0)


@pytest.mark.parametrize(
    "freed",
    [
        pytest.param(lambda turn: turn.release(0, 1), id="the older"),
        pytest.param(lambda turn: turn.release(1, 2), id="the newer"),
        pytest.param(lambda turn: turn.undo(1, 2) or turn.stop(), id="it stops, and gives back what it had not got"),
        pytest.param(lambda turn: ring.drop(turn.control, 0), id="it dies"),
        pytest.param(gone, id="it is gone"),
        pytest.param(lambda turn: ring.leave(turn.control, 0), id="it leaves"),
    ],
)
def test_whatever_frees_a_buffer_is_seen_after_a_look_at_a_full_ring(
    control: tuple[ring.Control, Ledger], freed: Callable[[Turn], object]
) -> None:
    choice = Choice(control[0])
    freed(full(control, choice))
    assert choice.pick() is not None


def test_a_slot_that_is_put_back_is_had_again_after_a_look_at_a_full_ring(control: tuple[ring.Control, Ledger]) -> None:
    ctl, ledger = control
    choice = Choice(ctl)
    turn = Turn(ctl, 0, ring.join(ctl, ledger, 0, block=0))
    write(ctl, ledger, choice)
    take(turn, 1)
    mine = choice.pick()
    assert mine is not None
    assert choice.pick() is None
    assert choice.pick() is None
    choice.put_back(mine[0])
    assert choice.pick() == mine
