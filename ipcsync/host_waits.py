"""The host waits that a session announces, so that a hang can be looked at from outside: ``ipcsync why``.

A wait that has slept for a while (:data:`TELL` and more) writes one of four pairs of words in its session's block of
the ledger, and takes it back when it ends. A shorter wait costs nothing, so a hand-off is as fast as without. In a pair
the second word is written first and the first one says that it holds: (wait entry, nanoseconds | kind).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from . import trace
from .errors import WaitTimeout
from .ledger import Block, Ledger, pack_wait, unpack_wait

TELL = 20_000_000  # nanoseconds
#: What is waited for: the record of a round, its completion, a buffer that readers still hold (of a channel or array),
#: a place in the wait budget; the next item of any of several channels, whose readers' AWAITED words say which.
ISSUED, COMPLETED, SPACE, BUDGET, SEVERAL = 1, 2, 3, 4, 7
FOR = {ISSUED: "input", COMPLETED: "completion", SPACE: "space", BUDGET: "budget", SEVERAL: "input"}
#: How a long wait ended; the words of Block.COUNTS.
CAME, TIMED_OUT, ENDED = 0, 1, 2
OUTCOMES = {CAME: "came", TIMED_OUT: "timed_out", ENDED: "ended"}
_KINDS = 7


class HostWait(NamedTuple):
    """One announced wait, as it is read from a block. ``since`` is CLOCK_MONOTONIC nanoseconds."""

    cell: int
    round: int
    kind: int
    since: int


class HostWaits:
    """This session's announced waits."""

    def __init__(self, ledger: Ledger, block: int) -> None:
        self.ledger, self.block = ledger, block
        self._at = ledger.block(block)
        self._free = list(range(Block.HOST_WAIT_COUNT))
        self._lock = threading.Lock()

    def of(self, kind: int, cell: int, round: int, name: str) -> Waiting:
        """For :func:`waiting.wait_word`: what its caller waits for."""
        return Waiting(self, kind, cell, round, name)

    def announce(self, wait: HostWait) -> int:
        """The place that the wait is written at; -1 when all are taken (it is not announced then)."""
        with self._lock:
            if not self._free:
                return -1
            place = self._free.pop()
        words, at = self.ledger.words, self._at + Block.HOST_WAITS + 2 * place
        words[at + 1] = wait.since & ~_KINDS | wait.kind
        words[at] = pack_wait(wait.cell, wait.round)
        return place

    def withdraw(self, place: int, outcome: int) -> None:
        words = self.ledger.words
        with self._lock:
            words[self._at + Block.COUNTS + outcome] += 1
            if place >= 0:
                words[self._at + Block.HOST_WAITS + 2 * place] = 0
                self._free.append(place)


class Waiting:
    """One host wait on its way: told to the ledger if it takes long, and to the trace if there is one.

    A context manager round the wait; a ``WaitTimeout`` leaves it with the reason in it.
    """

    __slots__ = ("_place", "_told", "_waits", "cell", "kind", "name", "round", "since")

    def __init__(self, waits: HostWaits, kind: int, cell: int, round: int, name: str) -> None:
        self._waits, self.kind, self.cell, self.round, self.name = waits, kind, cell, round, name
        self.since = time.monotonic_ns()
        self._told, self._place = False, -1

    def still(self) -> None:
        """Called between slices of sleep."""
        if not self._told and time.monotonic_ns() - self.since >= TELL:
            self._told = True
            self._place = self._waits.announce(HostWait(self.cell, self.round, self.kind, self.since))

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        self.over(error)

    def over(self, error: BaseException | None) -> None:
        """The wait has ended, in whatever way; raises a ``WaitTimeout`` that says why, instead of the bare one."""
        if self._told:
            outcome = CAME if error is None else TIMED_OUT if isinstance(error, WaitTimeout) else ENDED
            self._waits.withdraw(self._place, outcome)
        recorder = trace.ACTIVE
        if recorder is not None:
            what = FOR[self.kind]
            recorder.span("wait", f"{what} {self.name}", self.since, args={"for": what, "round": self.round})
        if isinstance(error, WaitTimeout):
            raise self._explained(error) from None

    def _explained(self, error: WaitTimeout) -> WaitTimeout:
        """The error, and who holds the wait up: field ``why``, and the end of its message."""
        from . import why, why_ledger

        ledger = self._waits.ledger
        wait = why.Wait(self._waits.block, self.kind, self.cell, self.round, self.since)
        try:
            picture = why_ledger.read(ledger, names={self.cell: self.name}, of_interest=[self.cell])
        except (OSError, ValueError):  # unmapped meanwhile: the session was closed
            return error
        text = why.sentences(why.follow(picture, wait))
        return WaitTimeout(f"{error.message}\n{text}", **error.fields, why=text)


def announced(ledger: Ledger, block: int) -> Iterator[HostWait]:
    """The waits that a session announces now."""
    words, at = ledger.words, ledger.block(block) + Block.HOST_WAITS
    for place in range(at, at + 2 * Block.HOST_WAIT_COUNT, 2):
        entry, about = words[place], words[place + 1]
        if entry and words[place] == entry:
            cell, round = unpack_wait(entry)
            yield HostWait(cell, round, about & _KINDS, about & ~_KINDS)
