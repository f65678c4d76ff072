"""A wait for any of several channels (``session.select``) is followed along all of them, and is a deadlock only along
all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcsync import linux, ring, why_ledger
from ipcsync.groups import SharedTurn
from ipcsync.host_waits import ISSUED, SEVERAL, SPACE, HostWait, HostWaits
from ipcsync.ledger import BLOCK_WORDS, FOREVER, Block, Cell, Ledger
from ipcsync.why import Holder, Picture, Proc, Thing, Wait, follow, sentences
from ipcsync.wire import ChannelSpec, FieldSpec

SAVE, FIRST, SECOND, THIRD = (Proc(i, i + 10, name, 100 + i) for i, name in enumerate(("save", "e.0", "e.1", "e.2")))
PROCS = {p.block: p for p in (SAVE, FIRST, SECOND, THIRD)}


def three(*more: Wait, held: tuple[int, ...] = ()) -> Picture:
    """`save` waits for any of three replicas, and holds all buffers of those `held`."""
    things = {
        i: Thing(i, f"edges.{i - 1}", "channel", recorder=i, holders=(Holder(0, 2, 0),) if i in held else ())
        for i in (1, 2, 3)
    }
    waits = tuple(Wait(0, ISSUED, i, 1, since=0, several=True) for i in (1, 2, 3))
    return Picture(10, PROCS, things, (*waits, *more))


def test_every_one_of_them_is_followed() -> None:
    for start in (SAVE, Thing(2, "edges.1", "channel", recorder=2)):
        chain = follow(three(), start)
        assert {link.wait.cell for link in chain.links} == {1, 2, 3}
        assert {end.block for end in chain.ends} == {1, 2, 3}
    assert "item 1 of channel 'edges.2' to be published (so far: 0), one of several" in sentences(chain)


@pytest.mark.parametrize("start", [SAVE, FIRST, SECOND, THIRD, Thing(1, "edges.0", "channel", recorder=1)])
def test_a_circle_along_some_of_them_is_no_deadlock_and_along_all_it_is(start: Proc | Thing) -> None:
    circles = [Wait(i, SPACE, i, 3, since=0) for i in (1, 2, 3)]
    some = follow(three(*circles[:2], held=(1, 2)), start)
    assert not some.deadlocks
    assert [end.block for end in some.ends] == [3]
    assert follow(three(*circles, held=(1, 2, 3)), start).deadlocks


def test_a_deadlock_behind_one_of_them_is_still_named() -> None:
    things = {4: Thing(4, "x", recorder=1), 5: Thing(5, "y", recorder=2)}
    seen = three(Wait(1, ISSUED, 5, 1, since=0), Wait(2, ISSUED, 4, 1, since=0))
    seen.things.update(things)
    assert follow(seen, SAVE).deadlocks == [["'e.0' (pid 101)", "'e.1' (pid 102)"]]


@pytest.fixture
def ledger(runtime: Path) -> Iterator[Ledger]:
    made = Ledger.create(runtime / "ledger", sessions=4, events=16)
    yield made
    made.region.close()


def live(ledger: Ledger, block: int) -> None:
    linux.membarrier_register()
    me, at, words = os.getpid(), ledger.block(block), ledger.words
    for i in range(BLOCK_WORDS):
        words[at + i] = 0
    words[at + Block.SESSION], words[at + Block.PID], words[at + Block.START] = block + 1, me, linux.start_time(me)
    words[at + Block.STATE] = Block.LIVE


def test_it_is_read_from_the_readers_cells(ledger: Ledger, runtime: Path) -> None:
    live(ledger, 2)
    spec = ChannelSpec(fields=(FieldSpec("data", (4,), "uint8"),), stride=64, depth=2)
    controls = []
    for cell in range(4):
        ledger.open_cell(cell, 10 + cell, name=f"edges.{cell}")
        ledger.words[ledger.cell(cell) + Cell.RECORDER] = 1
        controls.append(ring.create(runtime / f"ctl-{10 + cell}", spec, cell=cell, incarnation=10 + cell))
        ring.join(controls[-1], ledger, 0, block=2)
        ring.join(controls[-1], ledger, 1, block=3)  # another session's, which waits for none of them
    since = time.monotonic_ns() & ~7
    for control in controls[:3]:  # the fourth is read, and not waited for
        control.words[control.reader(0) + ring.Reader.AWAITED] = 7
    assert why_ledger.read(ledger).waits == ()  # nobody says that it takes long
    HostWaits(ledger, 2).announce(HostWait(0, 7, SEVERAL, since))
    expected = {Wait(2, ISSUED, cell, 7, since, several=True) for cell in range(3)}
    assert set(why_ledger.read(ledger).waits) == expected
    ring.join(controls[0], ledger, 0, block=2)  # a new reader waits for nothing yet
    assert len(why_ledger.read(ledger).waits) == 2
    for control in controls:
        control.region.close()
        control.region.path.unlink()


def test_who_has_taken_all_that_its_group_got_holds_nobody_up(ledger: Ledger, runtime: Path) -> None:
    for block in (0, 1, 2):
        live(ledger, block)
    ledger.open_cell(0, 5, name="frames")
    ledger.words[ledger.cell(0) + Cell.RECORDER] = 1
    spec = ChannelSpec(fields=(FieldSpec("data", (4,), "uint8"),), stride=64, depth=2)
    control = ring.create(runtime / "ctl-5", spec, cell=0, incarnation=5)
    for cell, block in enumerate((1, 2)):
        ring.join(control, ledger, cell, block=block, group=99)
    for item in (1, 2):
        control.words[control.buffers[item - 1] + ring.Buffer.ITEM] = item
        ledger.words[ledger.cell(0) + Cell.ISSUED] = item
    turns = [SharedTurn(control, cell, 1) for cell in (0, 1)]
    HostWaits(ledger, 0).announce(HostWait(0, 3, SPACE, time.monotonic_ns()))
    turns[0].take(2, FOREVER)
    assert set(why_ledger.read(ledger).things[0].holders) == {Holder(1, held=1, behind=1), Holder(2, held=0, behind=1)}
    turns[0].take(2, FOREVER)  # the other one has nothing, and waits for more
    assert set(why_ledger.read(ledger).things[0].holders) == {Holder(1, held=2, behind=0)}
    for turn in turns:
        turn.close()
    control.region.close()
    control.region.path.unlink()
