"""One event's timeline, seen from one process: the rounds that it records and waits for.

This is the client's half of the ledger's rules; shared events, channels and shared arrays are all built on it. The
other half is ``condemn.py``. The order of the stores and loads below is the point, see LEDGER.md rules 2 to 5 in
docs/design/ledger.md: announce (a wait entry, an intent), *then* load what may forbid it, *then* act.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import failpoints, linux
from .errors import (
    InvalidArgument,
    IpcSyncError,
    PeerDied,
    PeerFailed,
    RecorderBusy,
    ResourceLost,
    StaleHandle,
    WaitTimeout,
    WouldBlock,
)
from .host_waits import COMPLETED, ISSUED
from .ledger import FOREVER, LAST_ROUND, Cell, Ledger
from .waiting import Deadline, wait_word

if TYPE_CHECKING:
    from .backends.base import Backend, RawStream
    from .budget import Budget
    from .event import Event
    from .session_core import SessionCore


def verdict_error(ledger: Ledger, cell: int, name: str) -> IpcSyncError:
    """What a verdict on this cell means to whoever waits for it."""
    words, at = ledger.words, ledger.cell(cell)
    cause, pid = words[at + Cell.CAUSE], words[at + Cell.CULPRIT_PID]
    who, first_bad = ledger.read_text(at + Cell.CULPRIT_NAME), words[at + Cell.VERDICT]
    fields = {"session": who, "pid": pid, "round": first_bad, "name": name}
    peer = f"session {who!r} (pid {pid})"
    again = f"rounds of {name!r} from {first_bad} on will never be true; create or open the name anew"
    if cause == Cell.FAILED:
        return PeerFailed(f"work of {peer} raised: {again}", **fields)
    if cause == Cell.RESOURCE_LOST:
        return ResourceLost(f"the broker lost {name!r} in its restart: {again}", **fields)
    if cause == Cell.CONDEMNED_BY_OPERATOR:
        return PeerDied(f"an operator condemned {name!r}: {again}", **fields)
    if cause == Cell.SILENT:
        return PeerDied(f"{peer} is stopped or silent and its lease ran out: {again}", **fields)
    return PeerDied(f"{peer} died: {again}", **fields)


class Timeline:
    """The rounds of one incarnation. Thread-safe. `cuda_event` is the CUDA event, recorded too when asked for."""

    def __init__(
        self,
        session: SessionCore,
        backend: Backend,
        cell: int,
        incarnation: int,
        name: str,
        *,
        by_event: bool = False,
    ) -> None:
        self.session, self.backend, self.cell, self.incarnation, self.name = session, backend, cell, incarnation, name
        self.cuda_event: Event | None = None
        self.by_event = by_event
        self.region = session.ledger.region
        self.at = at = session.ledger.cell(cell)
        self._words = session.ledger.words
        self._word, self._issued, self._intent = at + Cell.WORD, at + Cell.ISSUED, at + Cell.INTENT
        self._verdict, self._owned, self._flags = at + Cell.VERDICT, at + Cell.INCARNATION, at + Cell.FLAGS
        self._bell = at + Cell.BELL
        self._wake = linux.waker(session.ledger.address(self._bell))  # quicker than bells.toll
        self._lock = threading.Lock()
        self._last_stream: Any = None
        self._told = session.told
        self._pen = False
        self._polled = backend.device_writes
        self._threaded, self._write = backend.is_thread(None), backend.write
        # By stream, of those that a wait was put on: whether it has passed the last one, and the budget it counts in.
        self._passing: dict[Any, tuple[Callable[[], bool], Budget | None]] = {}

    # -- reading

    @property
    def issued(self) -> int:
        """The last round submitted to its stream; 0 before the first."""
        return int(self._words[self.at + Cell.ISSUED])

    @property
    def completed(self) -> int:
        """The last round that is complete and true."""
        return self.session.ledger.completed(self.cell)

    @property
    def verdict(self) -> int:
        """The first round that will never be true; ``FOREVER`` while there is none."""
        return int(self._words[self.at + Cell.VERDICT])

    def stale(self) -> bool:
        return bool(self._words[self.at + Cell.INCARNATION] != self.incarnation)

    def error(self) -> IpcSyncError:
        """Why rounds from the verdict on are not to be had."""
        return verdict_error(self.session.ledger, self.cell, self.name)

    def check(self, round: int) -> None:
        """Raises if `round` can no longer come true, or if nothing can be waited for in this session."""
        session, words = self.session, self._words
        if session._refusal is not None or words[session._lease]:
            session.check()
        if words[self._verdict] <= round or words[self._owned] != self.incarnation:
            self.refuse(round)

    def refuse(self, round: int) -> None:
        if self.stale():
            raise StaleHandle(
                f"{self.name!r} has ended and its place was given away: open the name again", name=self.name
            )
        raise self.error()

    # -- recording

    @property
    def has_pen(self) -> bool:
        return self._pen

    def take_pen(self, grant: Callable[[], None]) -> None:
        """Makes this process the recorder; `grant` asks the broker, which alone writes RECORDER."""
        with self._lock:
            if not self._pen:
                grant()
                self._pen = True
                self._last_stream = None

    def drop_pen(self, deadline: Deadline, give_back: Callable[[], None]) -> None:
        """Lets the pen go once everything issued is complete."""
        with self._lock:
            if self._pen:
                self.wait_host(self.issued, deadline)
                give_back()
                self._pen = False

    def record(self, raw: RawStream, deadline: Deadline | None = None) -> int:
        """Marks the next round on the stream and returns its number. The caller holds the pen.

        `deadline` (the session's default) is for the rare record that must wait: on another stream than the last, with
        no place in the wait budget.
        """
        session, words = self.session, self._words
        if session._refusal is not None or words[session._lease]:
            session.check()
        here = raw is None and self._threaded  # the stream is this thread, and the round complete at once
        with self._lock:
            if not self._pen:
                raise RecorderBusy(
                    f"this session does not hold the pen of {self.name!r}: record() takes it", name=self.name
                )
            before: int = words[self._issued]
            round = before + 1
            words[self._intent] = round  # announce ...
            if failpoints.ARMED:
                failpoints.hit("record.intent")
            if words[self._verdict] <= round or words[self._owned] != self.incarnation:  # ... check ...
                self.refuse(round)
            if words[session._taint] != self._told:
                words[self._intent] = before
                self._told = session.told = session.taint
                raise session.taint_error()
            last = self._last_stream
            if raw is not last and words[self._word] < before and not self._after(raw, last, before, here):
                words[self._intent] = before
                round = 0
            else:
                if here:
                    if words[self._word] != FOREVER:  # a forced release stays
                        words[self._word] = round
                else:
                    self._write(raw, self.region, self._word, round, verdict=self._verdict, failed=self._failed)
                if failpoints.ARMED:
                    failpoints.hit("record.written")
                if words[self._flags] & Cell.MIRROR:
                    self._mirror(raw, round)
                if raw is not last:
                    self._last_stream = self.backend.stream_key(raw)
                words[self._issued] = round  # ... and say so
        if not round:
            # The host waits for the round before in the stream's stead, and holds no lock meanwhile.
            deadline = deadline or session.deadline()
            self.wait_host(before, deadline)
            return self.record(raw, deadline)
        if words[self._bell]:
            words[self._bell] = 0
            self._wake()
        return round

    def _mirror(self, raw: RawStream, round: int) -> None:
        event = self.cuda_event
        if event is not None:
            self.backend.event_record(event._raw, raw)
            self._words[self.at + Cell.CUDA_ROUND] = round

    def _after(self, raw: RawStream, last: Any, before: int, here: bool) -> bool:
        """Sees to it that the stream comes after the round before, which is not complete. False: the host must wait."""
        return last is None or self.backend.stream_key(raw) == last or self._behind(raw, before, here)

    def _behind(self, raw: RawStream, round: int, here: bool) -> bool:
        """Has the stream wait for our own round, if it may. It is announced as any wait: should another stream's work
        fail before that round, what this one goes on to record is condemned with it."""
        if here or not self.session.waits.announce(self.cell, round):
            return False
        if self._words[self.at + Cell.VERDICT] <= round:
            self.refuse(round)
        try:
            self._enqueue(raw, round, Deadline(0.0), block=False)
        except WouldBlock:
            return False
        return True

    def _enqueue(self, raw: RawStream, round: int, deadline: Deadline, *, block: bool) -> None:
        """Puts the wait on the stream, within the wait budget."""
        session, backend, index = self.session, self.backend, self._word
        if session.admit(backend, raw, self.region, index, round, deadline, self.name, block=block):
            event = self.cuda_event
            if self.by_event and event is not None:
                backend.event_wait(event._raw, raw)
            else:
                backend.wait(raw, self.region, index, round)
            if len(self._passing) > 64:  # streams come and go
                self._passing = {stream: found for stream, found in self._passing.items() if not found[0]()}
            self._passing[backend.stream_key(raw)] = backend.passed(raw), session.budget(backend, raw)

    def quiet(self) -> bool:
        """Whether this process's streams have passed every wait for this event: only then may its cell become
        another's."""
        return self.session.waits.reached(self.cell) and all(passed() for passed, _ in list(self._passing.values()))

    def _failed(self, error: BaseException) -> None:
        """The stream's work before this record raised: the round will never be true."""
        self.session.condemn_own(self, error)

    # -- waiting

    def resolve(self, round: int | None) -> int:
        """The round a wait without one means: the latest issued, and at least the first."""
        if round is None:
            return self._words[self._issued] or 1
        if not isinstance(round, int) or not 1 <= round <= LAST_ROUND:
            raise InvalidArgument(f"round={round!r}: rounds count from 1; None means the latest issued")
        return round

    def wait_issued(self, round: int, deadline: Deadline, *, block: bool = True) -> None:
        """The host step: returns once `round` was submitted."""
        if self._words[self._issued] < round:
            if not block:
                self.check(round)
                raise WouldBlock(f"round {round} of {self.name!r} is not issued yet (issued: {self.issued})")
            wait_word(
                self.region,
                self._issued,
                round,
                deadline,
                check=lambda: self.between_slices(round),
                what=lambda: f"the record of round {round} of {self.name!r} (issued: {self.issued})",
                waiting=lambda: self.session.waits.host.of(ISSUED, self.cell, round, self.name),
            )

    def wait_host(self, round: int, deadline: Deadline) -> None:
        """The host waits for the completion of `round`: a commit point, what it lets pass is true."""
        if round == 0:
            return
        if self._words[self._word] < round:
            wait_word(
                self.region,
                self._word,
                round,
                deadline,
                check=lambda: self.between_slices(round),
                what=lambda: f"round {round} of {self.name!r} (issued: {self.issued}, completed: {self.completed})",
                polled=self._polled,
                waiting=lambda: self.session.waits.host.of(COMPLETED, self.cell, round, self.name),
            )
        self.check(round)  # the word first, the verdict after

    def complete(self, round: int) -> bool:
        """Whether `round` is complete and true; raises if it will never be."""
        if self._words[self._word] < round:
            return False
        self.check(round)
        return True

    def _announce(self, round: int) -> bool:
        if not self.session.waits.announce(self.cell, round):
            return False
        if failpoints.ARMED:
            failpoints.hit("wait.announced")
        self.check(round)
        return True

    def wait_now(self, raw: RawStream, round: int) -> bool:
        """:meth:`wait` where the host has nothing to wait for, which is nearly always. False: nothing was done."""
        words, word = self._words, self._word
        if words[word] >= round:
            self.check(round)
            return True
        if raw is None or words[self._issued] < round:
            return False
        key = self.backend.stream_key(raw)
        found = self._passing.get(key)
        if found is None or self.by_event:
            return False
        passed, budget = found
        if not self._announce(round):
            return False
        if budget is not None and not budget.place(key, (words, word, round)):
            return False
        self.backend.wait(raw, self.region, word, round)
        if getattr(passed, "asked", True):
            self._passing[key] = self.backend.passed(raw), budget
        return True

    def wait(self, raw: RawStream, round: int, deadline: Deadline, *, block: bool = True) -> None:
        """Makes the stream wait for `round`; the host waits only until it is issued. On the host's own thread the
        stream is the caller, so this is :meth:`wait_host`."""
        if self.backend.is_thread(raw):
            if not block and self._words[self._word] < round:
                self.check(round)
                raise WouldBlock(f"round {round} of {self.name!r} is not complete yet (completed: {self.completed})")
            self.wait_host(round, deadline)
            return
        self.wait_issued(round, deadline, block=block)
        if self._words[self._word] >= round:
            self.check(round)
            return
        if not self._announce(round):
            self.wait_host(round, deadline)  # more waits outstanding than a block has room for
            return
        try:
            self._enqueue(raw, round, deadline, block=block)
        except WaitTimeout:
            self.check(round)
            raise

    def hold(self) -> None:
        """For the end of a session: keeps the broker from giving the cell away while this process lives."""
        self.session.waits.announce(self.cell, LAST_ROUND)

    def query(self, round: int | None) -> bool:
        """Whether `round` (or the latest issued) is complete and true; False when nothing was issued."""
        round = self.resolve(round)
        if self.complete(round):
            return True
        self.check(round)
        return False

    def between_slices(self, round: int) -> None:
        self.session.finish_condemning()
        self.check(round)
        recorder = self._words[self.at + Cell.RECORDER]
        if recorder and self.session.ledger.dying(recorder - 1) and not self.session.suspect(recorder - 1):
            raise self.session.dead(recorder - 1, self.name, round)


__all__ = ["FOREVER", "Timeline", "verdict_error"]
