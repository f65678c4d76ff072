"""Condemnation on a ledger alone: the verdict, the chain to its end, and only then the release."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipcsync import linux
from ipcsync.condemn import Culprit, condemn, finish_begun, recorded_by, release_word
from ipcsync.ledger import FOREVER, Block, Cell, Header, Ledger, pack_wait, unpack_wait
from ipcsync.timeline import verdict_error

CULPRIT = Culprit(Cell.DIED, session=7, pid=4242, name="camera")
_numbers = itertools.count()


class Page:
    """A small ledger with `sessions` live sessions, session i recording cell i."""

    def __init__(self, sessions: int) -> None:
        linux.membarrier_register()
        path = Path(f"/dev/shm/ipcsync-unit-{linux.os.getpid()}-{next(_numbers)}")
        self.ledger = Ledger.create(path, sessions=sessions, events=sessions)
        path.unlink()
        self.words = self.ledger.words
        for i in range(sessions):
            self.words[self.ledger.block(i) + Block.STATE] = Block.LIVE
            self.ledger.open_cell(i, incarnation=i + 1)
            self.words[self.ledger.cell(i) + Cell.RECORDER] = i + 1

    def record(self, cell: int, *, issued: int, completed: int) -> None:
        at = self.ledger.cell(cell)
        self.words[at + Cell.INTENT] = self.words[at + Cell.ISSUED] = issued
        self.words[at + Cell.WORD] = completed

    def wait(self, session: int, cell: int, round: int) -> None:
        at = self.ledger.block(session) + Block.WAITS
        slot = next(i for i in range(Block.WAIT_COUNT) if not self.words[at + i])
        self.words[at + slot] = pack_wait(cell, round)

    def verdict(self, cell: int) -> int:
        return int(self.words[self.ledger.cell(cell) + Cell.VERDICT])

    def word(self, cell: int) -> int:
        return int(self.words[self.ledger.cell(cell) + Cell.WORD])

    def taint(self, session: int) -> int:
        return int(self.words[self.ledger.block(session) + Block.TAINT])


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page(4)
    yield made
    made.ledger.region.close()


def test_verdict_is_the_first_round_that_did_not_complete(page: Page) -> None:
    page.record(0, issued=5, completed=3)
    report = condemn(page.ledger, [0], CULPRIT)
    assert report.verdicts == {0: 4}
    assert page.ledger.completed(0) == 3
    assert page.word(0) == FOREVER


def test_the_chain_is_condemned_to_its_end_and_only_the_dead_are_released(page: Page) -> None:
    for cell in range(4):
        page.record(cell, issued=2, completed=1)
    for session in (1, 2, 3):
        page.wait(session, session - 1, 2)
    report = condemn(page.ledger, [0], CULPRIT)
    assert report.verdicts == {0: 2, 1: 2, 2: 2, 3: 2}
    assert report.tainted == {1, 2, 3}
    assert [page.word(cell) for cell in range(4)] == [FOREVER, 1, 1, 1]


def test_nothing_is_released_before_every_verdict_stands(page: Page) -> None:
    for cell in range(3):
        page.record(cell, issued=1, completed=0)
    page.wait(1, 0, 1)
    page.wait(2, 1, 1)
    seen: dict[str, list[int]] = {}

    def look(point: str) -> None:
        seen[point] = [page.word(0), *(page.verdict(cell) for cell in range(3))]

    condemn(page.ledger, [0], CULPRIT, failpoint=look)
    assert seen["condemn.verdict"] == [0, 1, FOREVER, FOREVER]
    assert seen["condemn.release"] == [0, 1, 1, 1]


def test_a_wait_on_a_round_that_completed_condemns_nothing(page: Page) -> None:
    page.record(0, issued=5, completed=3)
    page.record(1, issued=1, completed=0)
    page.wait(1, 0, 3)
    assert condemn(page.ledger, [0], CULPRIT).verdicts == {0: 4}
    assert page.verdict(1) == FOREVER


def test_a_tainted_session_keeps_what_it_completed_and_what_it_had_not_begun(page: Page) -> None:
    page.record(0, issued=1, completed=0)
    page.record(1, issued=6, completed=6)
    page.wait(1, 0, 1)
    assert condemn(page.ledger, [0], CULPRIT).verdicts == {0: 1}
    assert page.taint(1) == 1, "its next record must be refused: its stream runs on over false data"


def test_a_second_death_does_not_move_the_first_verdict(page: Page) -> None:
    page.record(0, issued=4, completed=1)
    condemn(page.ledger, [0], CULPRIT)
    page.record(0, issued=4, completed=3)  # a write of the dying GPU lands late
    assert condemn(page.ledger, [0], CULPRIT).verdicts == {}
    assert page.verdict(0) == 2
    assert page.ledger.completed(0) == 1
    assert page.word(0) == FOREVER


def test_late_writes_are_released_again(page: Page) -> None:
    page.record(0, issued=4, completed=1)
    condemn(page.ledger, [0], CULPRIT)
    page.record(0, issued=4, completed=2)
    release_word(page.ledger, 0)
    assert page.word(0) == FOREVER


def test_a_condemnation_cut_short_is_finished_by_the_next(page: Page) -> None:
    for cell in range(3):
        page.record(cell, issued=1, completed=0)
    page.wait(1, 0, 1)
    page.wait(2, 1, 1)

    class Killed(Exception):
        pass

    def die(point: str) -> None:
        if point == "condemn.verdict":
            raise Killed

    with pytest.raises(Killed):
        condemn(page.ledger, [0], CULPRIT, failpoint=die)
    assert page.words[Header.CONDEMNING] & 1
    report = finish_begun(page.ledger, CULPRIT)
    assert report is not None
    assert [page.verdict(cell) for cell in range(3)] == [1, 1, 1]
    assert not page.words[Header.CONDEMNING] & 1
    assert finish_begun(page.ledger, CULPRIT) is None


def test_the_culprit_is_named(page: Page) -> None:
    page.record(0, issued=2, completed=1)
    condemn(page.ledger, [0], CULPRIT)
    error = verdict_error(page.ledger, 0, "frame")
    assert (error.session, error.pid, error.round, error.name) == ("camera", 4242, 2, "frame")
    assert "camera" in str(error)
    assert "4242" in str(error)


def test_recorded_by_names_the_cells_of_one_session(page: Page) -> None:
    page.words[page.ledger.cell(3) + Cell.RECORDER] = 2
    assert recorded_by(page.ledger, 1) == [1, 3]


@given(st.integers(0, 2**20 - 2), st.integers(0, 2**44 - 1))
def test_wait_entries_keep_cell_and_round(cell: int, round: int) -> None:
    assert unpack_wait(pack_wait(cell, round)) == (cell, round)
    assert pack_wait(cell, round) != 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.sets(st.integers(0, 5), max_size=3))
def test_condemned_is_exactly_what_hangs_on_the_dead(edges: list[tuple[int, int]], idle: set[int]) -> None:
    """Sessions that wait (a, b: a waits for b's round 1); `idle` ones have nothing pending of their own."""
    page = Page(6)
    for cell in range(6):
        page.record(cell, issued=1, completed=1 if cell in idle else 0)
    for waiter, target in edges:
        if target not in idle:  # a wait on a completed round hangs on nobody
            page.wait(waiter, target, 1)
    expected = {0} if 0 not in idle else set()
    while True:
        more = {a for a, b in edges if b in expected and a not in idle} | expected
        if more == expected:
            break
        expected = more
    report = condemn(page.ledger, [0], CULPRIT)
    assert {cell for cell in report.verdicts if page.verdict(cell) == 1} == expected
    page.ledger.region.close()
