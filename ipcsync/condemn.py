"""Condemning: how a death reaches everyone it concerns, and nobody passes on what was never finished.

A recorder died with rounds issued. Streams of other processes are blocked on its word, and there is only one way to
let them go: store a value that satisfies them. But then they run on over data that was never written, and what they
record behind is as false as their input; a third process that waits for *them* would pass in good faith. So before
anything is released, the verdict travels to the end of the chain (LEDGER.md, rule 5):

1. The dead recorder's events get their verdict: the first bad round, ``completed + 1``.
2. membarrier. Every session that has a device wait outstanding on a condemned round is *tainted*: any of its streams
   may now carry false data (by process, not by stream: local events and the null stream carry data across streams
   unseen, so this may condemn more than needed, never less).
3. membarrier. Every event that a tainted session records, and that has a round begun but not complete
   (``INTENT > WORD``), is condemned from ``completed + 1``. What completed before could not depend on the release,
   because nothing has been released yet.
4. Back to 2 with the newly condemned ones, until there is none.
5. Only now the words of the dead are released. Living recorders' words are not touched: their streams, released by
   the dead ones' words, write them themselves.

Why nobody slips through: a session stores its wait entry, *then* loads the verdict, then enqueues; it stores its
intent, *then* loads its taint, then enqueues. This side stores, fences every process (membarrier), then scans. So for
each pair either the session sees the verdict or this scan sees the entry; x86 could miss both without the fence.

It is idempotent, needs no broker, and must be run by whoever holds the broker's lock (it writes the broker's words).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from . import linux
from .ledger import FOREVER, Block, Cell, Header, Ledger


@dataclass(frozen=True)
class Culprit:
    """Whose fault it is, as every waiter will be told. `session` is its number, `cause` one of ``Cell``'s causes."""

    cause: int
    session: int = 0
    pid: int = 0
    name: str = ""


@dataclass
class Report:
    """What one condemnation did: first bad round per cell, and the blocks it tainted."""

    verdicts: dict[int, int] = field(default_factory=dict)
    tainted: set[int] = field(default_factory=set)


def _nothing(_: str) -> None:
    pass


def condemn(
    ledger: Ledger,
    cells: Iterable[int],
    culprit: Culprit,
    *,
    release: bool = True,
    failpoint: Callable[[str], None] = _nothing,
) -> Report:
    """Ends the incarnation of `cells` and of all that hangs on them; `release` forces their words (the writer is dead).

    A cell that has a verdict already keeps it: verdicts never move. Its word is still released when asked for.
    """
    words = ledger.words
    report = Report()
    words[Header.CONDEMNING] |= 1
    dead = list(cells)
    frontier = {cell for cell in dead if _judge(ledger, cell, culprit, report)}
    failpoint("condemn.verdict")
    while frontier:
        linux.membarrier()
        tainted = _taint(ledger, frontier, report)
        linux.membarrier()
        frontier = _condemn_recorded_by(ledger, tainted, culprit, report)
    failpoint("condemn.release")
    if release:
        for cell in dead:
            words[ledger.cell(cell) + Cell.FLAGS] |= Cell.RELEASE
            release_word(ledger, cell)
    for cell in {*dead, *report.verdicts}:
        ledger.wake(ledger.cell(cell))
    words[Header.CONDEMNING] += 1  # even again
    return report


def release_word(ledger: Ledger, cell: int) -> None:
    """Lets go whoever waits on the word. Again at each tick: a dying GPU context may still write a round over it."""
    at = ledger.cell(cell) + Cell.WORD
    if ledger.words[at] != FOREVER:
        ledger.words[at] = FOREVER
        ledger.wake(at)


def recorded_by(ledger: Ledger, block: int) -> list[int]:
    """The cells whose pen this session holds."""
    words, at = ledger.words, ledger.cell(0) + Cell.RECORDER
    return [
        cell
        for cell in range(words[Header.CELLS_USED])
        if words[at + (ledger.cell(cell) - ledger.cell(0))] == block + 1
    ]


def finish_begun(ledger: Ledger, culprit: Culprit) -> Report | None:
    """Completes a condemnation that its author did not live to complete; None when there is none.

    Every verdict is treated as new: this may taint a session twice, which costs it one more exception, no more.
    """
    words = ledger.words
    if not words[Header.CONDEMNING] & 1:
        return None
    report = Report()
    begun = {
        cell for cell in range(words[Header.CELLS_USED]) if words[ledger.cell(cell) + Cell.VERDICT] not in (0, FOREVER)
    }
    frontier = set(begun)
    while frontier:
        linux.membarrier()
        tainted = _taint(ledger, frontier, report)
        linux.membarrier()
        frontier = _condemn_recorded_by(ledger, tainted, culprit, report)
    words[Header.CONDEMNING] += 1
    return report


def _judge(ledger: Ledger, cell: int, culprit: Culprit, report: Report) -> bool:
    """Stores the verdict, the culprit first so that whoever reads the verdict can name it. False when it had one."""
    words, at = ledger.words, ledger.cell(cell)
    if words[at + Cell.VERDICT] != FOREVER:
        return False
    words[at + Cell.CAUSE] = culprit.cause
    words[at + Cell.CULPRIT_SESSION] = culprit.session
    words[at + Cell.CULPRIT_PID] = culprit.pid
    ledger.write_text(at + Cell.CULPRIT_NAME, culprit.name)
    verdict = words[at + Cell.WORD] + 1
    words[at + Cell.VERDICT] = verdict
    if words[at + Cell.ISSUED] < verdict - 1:
        # It died between the write of a round and the word that says so: that round is complete, and who waits for it
        # to be issued would wait for good. After the verdict: a living recorder stores no more from here on.
        words[at + Cell.ISSUED] = verdict - 1
    report.verdicts[cell] = verdict
    return True


def _taint(ledger: Ledger, condemned: set[int], report: Report) -> set[int]:
    """Marks the sessions that have a device wait outstanding on a condemned round; returns their blocks."""
    words = ledger.words
    found = set()
    for block in range(ledger.sessions):
        at = ledger.block(block)
        if words[at + Block.STATE] not in (Block.LIVE, Block.DYING):
            continue
        for cell, round in ledger.waits(block):
            if cell in condemned and words[ledger.cell(cell) + Cell.VERDICT] <= round:
                words[at + Block.CULPRIT] = cell + 1
                words[at + Block.TAINT] += 1
                found.add(block)
                break
    report.tainted |= found
    return found


def _condemn_recorded_by(ledger: Ledger, blocks: set[int], culprit: Culprit, report: Report) -> set[int]:
    words = ledger.words
    condemned = set()
    for cell in range(words[Header.CELLS_USED]) if blocks else ():
        at = ledger.cell(cell)
        if words[at + Cell.RECORDER] - 1 not in blocks or words[at + Cell.INTENT] <= words[at + Cell.WORD]:
            continue
        if _judge(ledger, cell, culprit, report):
            condemned.add(cell)
    return condemned
