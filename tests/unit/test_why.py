"""Who waits for whom, on pictures made by hand and on one read from a real ledger."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ipcsync import linux, ring, why_ledger
from ipcsync.budget import Budget
from ipcsync.errors import WaitTimeout
from ipcsync.host_waits import BUDGET, COMPLETED, ISSUED, SPACE, HostWait, HostWaits, announced
from ipcsync.ledger import BLOCK_WORDS, Block, Cell, Ledger, pack_wait
from ipcsync.waiting import Deadline, wait_word
from ipcsync.why import DEVICE, NAME, Holder, Picture, Proc, Thing, Wait, as_json, find, follow, sentences
from ipcsync.wire import ChannelSpec, FieldSpec

READ, EDGES, SAVE = (Proc(i, i + 10, name, 100 + i) for i, name in enumerate(("read", "edges", "save")))
PROCS = {p.block: p for p in (READ, EDGES, SAVE)}
SECOND = 1_000_000_000


def picture(*waits: Wait, things: tuple[Thing, ...], procs: dict[int, Proc] | None = None) -> Picture:
    return Picture(10 * SECOND, procs or PROCS, {t.cell: t for t in things}, waits)


def test_a_chain_is_followed_to_the_stopped_process_that_holds_it_up() -> None:
    stopped = Proc(2, 12, "save", 102, "stopped")
    seen = picture(
        Wait(1, SPACE, 1, 9, since=3 * SECOND),
        Wait(0, SPACE, 0, 5, since=4 * SECOND),
        things=(
            Thing(0, "frames", "channel", recorder=0, issued=4, completed=4, holders=(Holder(1, 4, 0),)),
            Thing(1, "edges", "channel", recorder=1, issued=8, completed=8, holders=(Holder(2, 2, 2),)),
        ),
        procs={**PROCS, 2: stopped},
    )
    chain = follow(seen, READ)
    assert [(link.wait.block, link.blockers) for link in chain.links] == [(0, (1,)), (1, (2,))]
    assert [(end.kind, end.block) for end in chain.ends] == [("stopped", 2)]
    assert not chain.deadlocks
    assert sentences(chain).splitlines() == [
        "'read' (pid 100) waits for a free buffer of channel 'frames', for 6.0 s",
        "'edges' (pid 101) waits for a free buffer of channel 'edges', for 7.0 s",
        "held up by: 'save' (pid 102) is stopped (a signal or a debugger holds it)",
    ]


def test_a_cycle_is_named_once_however_it_is_entered() -> None:
    things = (Thing(0, "a", recorder=0), Thing(1, "b", recorder=1))
    seen = picture(Wait(0, ISSUED, 1, 1, since=0), Wait(1, COMPLETED, 0, 1, since=0), things=things)
    for start in (READ, EDGES, things[0], things[1]):
        chain = follow(seen, start)
        assert chain.deadlocks == [["'read' (pid 100)", "'edges' (pid 101)"]]
        assert not chain.ends
    assert "deadlock: 'read' (pid 100) waits for 'edges' (pid 101) waits for 'read' (pid 100)" in sentences(chain)


def test_a_session_that_waits_for_its_own_record_is_a_deadlock() -> None:
    seen = picture(Wait(0, ISSUED, 0, 1, since=0), things=(Thing(0, "a", recorder=0),))
    assert "deadlock: 'read' (pid 100) waits for itself" in sentences(follow(seen, READ))


def test_both_readers_that_hold_a_writer_up_are_followed() -> None:
    channel = Thing(0, "frames", "channel", recorder=0, holders=(Holder(1, 1, 0), Holder(2, 1, 0)))
    chain = follow(picture(Wait(0, SPACE, 0, 5, since=0), things=(channel,)), READ)
    assert {end.block for end in chain.ends} == {1, 2}


@pytest.mark.parametrize(
    ("thing", "kind", "expected"),
    [
        (Thing(0, "a"), ISSUED, "nobody"),
        (Thing(0, "a", recorder=1, verdict=1), ISSUED, "condemned"),
        (Thing(0, "a", recorder=1, issued=3, completed=3), COMPLETED, "released"),
        (Thing(0, "a", "channel", recorder=0), SPACE, "released"),
        (Thing(0, "a", recorder=7), DEVICE, "dead"),
        (Thing(0, "a", recorder=1), BUDGET, "working"),
    ],
)
def test_ends(thing: Thing, kind: int, expected: str) -> None:
    chain = follow(picture(Wait(0, kind, 0, 1), things=(thing,)), READ)
    assert [end.kind for end in chain.ends] == [expected]
    assert as_json(chain)["ends"][0]["text"] in sentences(chain)


def test_a_full_budget_is_followed_to_what_its_streams_wait_for() -> None:
    seen = picture(
        Wait(0, BUDGET, 0, 1, since=0),
        Wait(0, DEVICE, 1, 4),
        things=(Thing(0, "a", recorder=1), Thing(1, "b", recorder=2, issued=4, completed=3)),
    )
    chain = follow(seen, Wait(0, BUDGET, 0, 1, since=0))
    assert [(link.wait.kind, link.blockers) for link in chain.links] == [(BUDGET, (1,)), (DEVICE, (2,))]
    assert "round 4 of event 'b', on a stream (issued: 4, complete: 3)" in sentences(chain)


def test_names_are_found_as_sessions_and_as_things() -> None:
    seen = picture(things=(Thing(0, "edges", "channel", "run-1"), Thing(1, "edges", "channel", "run-2")))
    assert find(seen, "edges") == [EDGES, seen.things[0], seen.things[1]]
    assert find(seen, "run-2/edges") == [seen.things[1]]


def test_a_name_that_nobody_created_is_found_by_who_waits_for_it() -> None:
    seen = picture(Wait(1, NAME, -1, 0, 8 * SECOND, "frames"), things=())
    chain = follow(seen, *find(seen, "frames"))
    assert sentences(chain).splitlines() == [
        "'edges' (pid 101) waits for 'frames' to be created, for 2.0 s",
        "and: nobody has created 'frames'",
    ]
    assert follow(seen, EDGES) == chain


# -- the ledger


@pytest.fixture
def ledger(runtime: Path) -> Ledger:
    return Ledger.create(runtime / "ledger", sessions=4, events=16)


def live(ledger: Ledger, block: int, name: str) -> None:
    words, at = ledger.words, ledger.block(block)
    for i in range(BLOCK_WORDS):
        words[at + i] = 0
    words[at + Block.SESSION], words[at + Block.PID] = block + 1, os.getpid()
    words[at + Block.START] = linux.start_time(os.getpid())
    ledger.write_text(at + Block.NAME, name)
    words[at + Block.STATE] = Block.LIVE


def test_the_ledger_tells_names_recorders_and_waits(ledger: Ledger) -> None:
    live(ledger, 0, "read")
    live(ledger, 1, "edges")
    ledger.open_cell(3, 7, name="frame")
    ledger.words[ledger.cell(3) + Cell.RECORDER] = 1
    ledger.words[ledger.cell(3) + Cell.ISSUED] = 2
    ledger.words[ledger.block(1) + Block.WAITS + 5] = pack_wait(3, 2)
    waits = HostWaits(ledger, 1)
    place = waits.announce(HostWait(3, 2, COMPLETED, 8 * SECOND))
    seen = why_ledger.read(ledger)
    assert seen.things[3] == Thing(3, "frame", recorder=0, issued=2)
    assert set(seen.waits) == {Wait(1, DEVICE, 3, 2), Wait(1, COMPLETED, 3, 2, 8 * SECOND)}
    assert seen.procs[0] == Proc(0, 1, "read", os.getpid())
    waits.withdraw(place, 0)
    assert list(announced(ledger, 1)) == []
    ledger.words[ledger.cell(3) + Cell.WORD] = 2
    assert why_ledger.read(ledger).waits == ()


def test_a_channel_tells_which_reader_holds_its_buffers(ledger: Ledger, runtime: Path) -> None:
    live(ledger, 0, "read")
    live(ledger, 1, "edges")
    ledger.open_cell(0, 5, name="frames")
    ledger.words[ledger.cell(0) + Cell.RECORDER] = 1
    spec = ChannelSpec(fields=(FieldSpec("data", (4,), "uint8"),), stride=64, depth=2)
    control = ring.create(runtime / "ctl-5", spec, cell=0, incarnation=5)
    linux.membarrier_register()
    ring.join(control, ledger, 0, block=1)
    for item in (1, 2):
        control.words[control.buffers[item - 1] + ring.Buffer.ITEM] = item
    at = control.reader(0)
    control.words[at + control.taken] = 1
    control.words[at + ring.Reader.CURSOR] = 2
    ledger.words[ledger.cell(0) + Cell.ISSUED] = 2
    HostWaits(ledger, 0).announce(HostWait(0, 3, SPACE, time.monotonic_ns()))
    thing = why_ledger.read(ledger).things[0]
    assert (thing.kind, thing.holders) == ("channel", (Holder(1, held=1, behind=1),))
    control.region.close()
    (runtime / "ctl-5").unlink()


def test_a_wait_that_times_out_says_who_holds_it_up_and_a_short_one_is_not_announced(ledger: Ledger) -> None:
    live(ledger, 0, "read")
    live(ledger, 1, "edges")
    ledger.open_cell(0, 5, name="frame")
    ledger.words[ledger.cell(0) + Cell.RECORDER] = 2
    at = ledger.cell(0) + Cell.ISSUED
    waits = HostWaits(ledger, 0)
    seen: list[list[HostWait]] = []

    def wait(timeout: float) -> None:
        wait_word(
            ledger.region,
            at,
            1,
            Deadline(timeout),
            check=lambda: seen.append(list(announced(ledger, 0))),
            what=lambda: "the record",
            waiting=lambda: waits.of(ISSUED, 0, 1, "frame"),
        )

    with pytest.raises(WaitTimeout) as caught:
        wait(1.0)
    assert "'read' (pid" in caught.value.why
    assert "waits for round 1 of event 'frame' to be recorded (so far: 0)" in caught.value.why
    assert f"held up by: 'edges' (pid {os.getpid()}) waits for nobody" in str(caught.value)
    assert seen[0] == []
    assert [(w.cell, w.round, w.kind) for w in seen[-1]] == [(0, 1, ISSUED)]
    assert list(announced(ledger, 0)) == []
    assert ledger.words[ledger.block(0) + Block.COUNTS + 1] == 1
    ledger.words[at] = 1
    wait(0.2)
    assert ledger.words[ledger.block(0) + Block.COUNTS] == 0


def test_a_wait_that_the_budget_keeps_is_announced_and_explained(ledger: Ledger) -> None:
    live(ledger, 0, "read")
    ledger.open_cell(0, 5, name="frame")
    waits, budget = HostWaits(ledger, 0), Budget(1)
    never = memoryview(bytearray(8)).cast("Q"), 0, 1
    assert budget.enter("one", never, Deadline(None), "frame")
    seen: list[HostWait] = []
    with pytest.warns(RuntimeWarning, match="wait budget"), pytest.raises(WaitTimeout) as caught:
        budget.enter(
            "another",
            never,
            Deadline(0.2),
            "frame",
            check=lambda: seen.extend(announced(ledger, 0)),
            waiting=lambda: waits.of(BUDGET, 0, 1, "frame"),
        )
    assert seen[-1].kind == BUDGET
    assert caught.value.budget == 1
    assert "a place in its wait budget" in caught.value.why
    assert list(announced(ledger, 0)) == []
