"""A timeline's stores and loads, with a death put exactly between two of them (LEDGER.md, rules 2 to 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ipcsync import condemn, errors, linux
from ipcsync.backends.host import HostBackend
from ipcsync.ledger import FOREVER, Block, Cell
from ipcsync.timeline import Timeline
from ipcsync.wait_table import WaitTable
from ipcsync.waiting import Deadline

from .test_condemn import CULPRIT, Page


class Words:
    """The ledger's words; something happens right after word `index` was read, or written, for the first time."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self._then: dict[tuple[str, int], Callable[[], None]] = {}
        self.trail: list[tuple[str, int]] = []

    def after(self, what: str, index: int, action: Callable[[], None]) -> None:
        self._then[what, index] = action

    def _did(self, what: str, index: int) -> None:
        self.trail.append((what, index))
        action = self._then.pop((what, index), None)
        if action is not None:
            action()

    def __getitem__(self, index: Any) -> Any:
        value = self._words[index]
        if isinstance(index, int):
            self._did("read", index)
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value
        self._did("write", index)


class Session:
    """What a timeline needs of one: number 1."""

    def __init__(self, ledger: Any) -> None:
        self.ledger, self.told = ledger, 0
        self.waits = WaitTable(ledger, 1)
        self._taint, self._lease = ledger.block(1) + Block.TAINT, ledger.block(1) + Block.LEASE
        self._refusal = None

    @property
    def taint(self) -> int:
        return int(self.ledger.words[self._taint])

    def check(self) -> None:
        pass

    def admit(self, *_: Any, **__: Any) -> bool:
        return True

    def budget(self, *_: Any) -> None:
        return None

    def finish_condemning(self) -> None:
        pass

    def suspect(self, block: int) -> bool:
        return True

    def taint_error(self) -> errors.PeerDied:
        return errors.PeerDied("tainted", session="", pid=0, round=1, name="")


class Seen:
    """Session 1's view of cell 0, which session 0 records, and of cell 1, which it records itself."""

    def __init__(self) -> None:
        self.page = page = Page(2)
        self.words = Words(page.words)
        region = SimpleNamespace(words=self.words, address=page.ledger.region.address, path="", bell_of=lambda _: None)
        ledger = SimpleNamespace(
            words=self.words,
            region=region,
            cell=page.ledger.cell,
            block=page.ledger.block,
            address=page.ledger.address,
            read_text=page.ledger.read_text,
            dying=page.ledger.dying,
            completed=lambda cell: type(page.ledger).completed(ledger, cell),  # type: ignore[arg-type]
        )
        self.ledger = ledger
        self.enqueued: list[int] = []
        backend = SimpleNamespace(
            device_writes=False,
            is_thread=lambda raw: raw is None,
            stream_key=lambda raw: raw,
            wait=lambda raw, region, index, round: self.enqueued.append(round),
            write=lambda raw, *rest, **more: self.enqueued.append(rest[2]),
            passed=lambda raw: lambda: False,
        )
        session = Session(ledger)
        self.theirs, self.ours = (
            Timeline(session, backend, cell, cell + 1, "frame")  # type: ignore[arg-type]
            for cell in (0, 1)
        )
        self.ours.take_pen(lambda: None)

    def die(self) -> None:
        """Session 0 dies, and everything that follows from it is done before anybody else moves."""
        condemn.condemn(self.page.ledger, [0], CULPRIT)


@pytest.fixture
def seen() -> Iterator[Seen]:
    made = Seen()
    yield made
    made.page.ledger.region.close()


def test_a_word_is_read_before_its_verdict(seen: Seen) -> None:
    """Were it the other way round: no verdict is seen, then the release, and the released word passes for a round."""
    seen.page.record(0, issued=1, completed=0)
    at = seen.page.ledger.cell(0)
    seen.words.after("read", at + Cell.VERDICT, seen.die)
    with pytest.raises(errors.PeerDied):
        seen.theirs.wait_host(1, Deadline(5.0))
    seen.page.ledger.open_cell(0, incarnation=1)
    seen.page.record(0, issued=1, completed=0)
    seen.words.after("read", at + Cell.VERDICT, seen.die)
    assert seen.theirs.completed == 0
    assert seen.page.word(0) == FOREVER


def test_a_wait_is_announced_before_the_verdict_is_looked_at(seen: Seen) -> None:
    """A death right after the look finds the wait: what this process goes on to record is condemned with it."""
    seen.page.record(0, issued=1, completed=0)
    seen.page.record(1, issued=1, completed=0)
    mine = seen.page.ledger.block(1) + Block.WAITS
    verdict = seen.page.ledger.cell(0) + Cell.VERDICT
    seen.theirs.wait("stream", 1, Deadline(5.0))
    trail = seen.words.trail
    stored = next(i for i, (what, index) in enumerate(trail) if what == "write" and index >= mine)
    assert ("read", verdict) in trail[stored:], "announce, check, act"
    assert seen.enqueued == [1]
    seen.die()
    assert seen.page.verdict(1) == 1


def test_a_wait_that_meets_the_verdict_enqueues_nothing(seen: Seen) -> None:
    seen.page.record(0, issued=1, completed=0)
    seen.words.after("read", seen.page.ledger.cell(0) + Cell.WORD, seen.die)
    with pytest.raises(errors.PeerDied):
        seen.theirs.wait("stream", 1, Deadline(5.0))
    assert seen.enqueued == []


def test_a_record_announces_its_intent_before_it_looks_and_acts(seen: Seen) -> None:
    at = seen.page.ledger.cell(1)
    seen.words.after("write", at + Cell.INTENT, lambda: condemn.condemn(seen.page.ledger, [1], CULPRIT, release=False))
    with pytest.raises(errors.PeerDied):
        seen.ours.record("stream")
    assert seen.enqueued == []
    assert seen.ours.issued == 0


def test_a_round_meant_as_its_input_dies_is_condemned_with_it(seen: Seen) -> None:
    seen.page.record(0, issued=1, completed=0)
    seen.page.wait(1, 0, 1)
    seen.words.after("write", seen.page.ledger.cell(1) + Cell.INTENT, seen.die)
    with pytest.raises(errors.PeerDied):
        seen.ours.record("stream")
    assert seen.page.verdict(1) == 1
    assert seen.enqueued == []


def test_a_taint_between_intent_and_act_stops_the_record(seen: Seen) -> None:
    """The stream runs on over what a dead recorder never wrote: nothing may be recorded behind it before that is said.
    The round was only meant, not begun: after the exception it may be recorded."""
    seen.page.record(0, issued=1, completed=0)
    seen.page.wait(1, 0, 1)
    seen.words.after("read", seen.page.ledger.cell(1) + Cell.ISSUED, seen.die)
    with pytest.raises(errors.PeerDied):
        seen.ours.record("stream")
    assert seen.enqueued == []
    assert seen.ours.record("stream") == 1


def test_another_incarnation_in_the_cell_is_not_waited_for(seen: Seen) -> None:
    seen.page.ledger.open_cell(0, incarnation=77)
    seen.page.record(0, issued=5, completed=5)
    for call in (
        lambda: seen.theirs.wait_host(1, Deadline(5.0)),
        lambda: seen.theirs.wait("stream", 1, Deadline(5.0)),
        lambda: seen.theirs.query(1),
    ):
        with pytest.raises(errors.StaleHandle):
            call()
    assert seen.enqueued == []


def test_another_incarnation_in_the_cell_is_not_recorded(seen: Seen) -> None:
    seen.page.ledger.open_cell(1, incarnation=77)
    with pytest.raises(errors.StaleHandle):
        seen.ours.record(None)
    assert seen.page.word(1) == 0


# -- who releases


def test_a_condemned_recorder_that_lives_releases_nobody_else(seen: Seen) -> None:
    """Between its verdict and the end of the chain its stream completes a round, which is true: whoever waits for a
    later one, behind what the dead never wrote, must not pass before it is condemned itself."""
    at = seen.page.ledger.cell(1)
    seen.page.record(1, issued=3, completed=0)
    seen.words[at + Cell.VERDICT] = 1
    region: Any = seen.ledger.region
    host = HostBackend()
    host.write(None, region, at + Cell.WORD, 1, verdict=at + Cell.VERDICT)
    assert seen.page.word(1) == 1
    seen.words[at + Cell.WORD] = FOREVER
    host.write(None, region, at + Cell.WORD, 2, verdict=at + Cell.VERDICT)
    assert seen.page.word(1) == FOREVER, "what was released by force stays released"


def test_nor_does_one_that_records_on_its_own_thread(seen: Seen) -> None:
    """The verdict comes between its look and its store."""
    at = seen.page.ledger.cell(1)
    block = seen.page.ledger.block(1) + Block.TAINT
    seen.words.after("read", block, lambda: seen.words.__setitem__(at + Cell.VERDICT, 1))
    assert seen.ours.record(None) == 1
    assert seen.page.word(1) == 1
    assert seen.ours.completed == 0


# -- the fence: what a session stored just now may not be seen by the condemner before it


@pytest.mark.parametrize("late", ["the wait", "the intent"])
def test_what_the_fence_makes_visible_is_found(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """The session's store stands in its processor's buffer until membarrier: the scan must come after one, twice."""
    page = Page(2)
    page.record(0, issued=1, completed=0)
    fences = 0

    def show_wait() -> None:
        page.wait(1, 0, 1)

    def show_intent() -> None:
        page.record(1, issued=0, completed=0)
        page.words[page.ledger.cell(1) + Cell.INTENT] = 1

    def fence() -> None:
        nonlocal fences
        fences += 1
        if late == "the wait" and fences == 1:
            show_wait()
        if late == "the intent" and fences == 2:
            show_intent()

    monkeypatch.setattr(linux, "membarrier", fence)
    if late == "the wait":
        show_intent()
    else:
        show_wait()
    assert condemn.condemn(page.ledger, [0], CULPRIT).verdicts == {0: 1, 1: 1}
    page.ledger.region.close()
