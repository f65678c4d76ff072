"""Shared arrays: memory that one process writes and many read in place, a version at a time.

A version is a round of the array's event. A reader says that it reads (BEGUN), then looks whether a version is being
written (CLAIMED); the writer says that it is about to write, fences, then looks who reads. So of every read and write
either the writer waits for the reader or the reader steps back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import bells, linux, opening
from .backends.base import Memory, RawStream
from .device import the
from .errors import InvalidState, IpcSyncError, PeerDied, ResourceLost, StaleHandle, WaitTimeout
from .fields import Field
from .host_waits import ISSUED, SPACE
from .lanes import Lanes
from .ledger import Cell
from .ring import Control, Head, Reader
from .shm import Region
from .slot import Slot, current, decode_meta, encode_meta
from .waiting import UNSET, Deadline, Timeout, wait_word
from .wire import (
    ArrayInfo,
    Empty,
    Pen,
    PenBack,
    PenReply,
)

if TYPE_CHECKING:
    from .session import Session


class View(Slot):
    """The array in one version: ``view["layer.0"]``, or ``view.array`` of the only one.

    ``version`` is its number, ``meta`` what its writer said of it (in ``write``: a dict to set until the block ends).
    """

    __slots__ = ("meta", "version")

    def __init__(self, raw: RawStream, version: int, arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        super().__init__(raw)
        self.version, self._arrays, self.meta = version, arrays, meta


class SharedArray:
    """A named array, or a dict of them. Made by ``session.share``, ``session.create_array``, ``session.open_array``.

    ``name``, ``fields`` (name to :class:`Field`), ``device``, ``version`` (the last one published; 0 before the first).
    """

    def __init__(self, session: Session, info: ArrayInfo, own: dict[str, Any] | None = None) -> None:
        self.session, self.info, self.spec = session, info, info.spec
        self.name, self.incarnation = info.event.name, info.event.incarnation
        self.fields = {f.name: Field(f.shape, f.dtype) for f in info.spec.fields}
        self.backend, self.index = session.backend(info.event.device)
        self.device = the(self.backend.device_type, self.index)
        self.control = Control(session.map(info.control))
        with self.backend.using(self.index):
            self.backend.register(self.control.region)
        self._words, self._ledger = self.control.words, session.ledger.words
        self._timeline = session.open_timeline(info.event)
        self._at = self._timeline.at
        self._own = own  # the caller's arrays themselves, where `share` was called
        self._memory: list[Memory] = []
        self._arrays: dict[bool, dict[str, Any]] = {}
        self._readers = Lanes(self)
        self._last: Hashable = None  # the stream that wrote the last version
        self._setup = threading.Lock()
        self._writing = threading.Lock()
        self._closed = False
        session.adopt(self)

    def __repr__(self) -> str:
        return f"<ipcsync.SharedArray {self.name!r} version {self.version} on {self.device}>"

    @property
    def version(self) -> int:
        """The last version published; 0 before the first."""
        return self._timeline.issued

    # -- writing

    @contextlib.contextmanager
    def write(
        self, stream: Any = None, meta: Mapping[str, Any] | None = None, *, timeout: Timeout = UNSET
    ) -> Iterator[View]:
        """The next version: `stream` waits until every reader of the one before is done, the block writes, and leaving
        it publishes. One process writes at a time (``RecorderBusy``), until ``release()``, ``close()`` or its death.

        An exception in the block condemns the version: the memory is neither the old nor the new, and readers get
        ``PeerFailed``. So does dying in it (``PeerDied``). Create the array anew then.
        """
        self._check()
        raw = self.session.stream(stream, self.device)
        deadline = self.session.deadline(timeout)
        if not self._writing.acquire(timeout=deadline.left(threading.TIMEOUT_MAX)):
            raise WaitTimeout(f"another thread is writing {self.name!r}", timeout=deadline.timeout)
        try:
            self._take_pen(deadline)
            view = View(raw, self.version + 1, self._views(writable=True), dict(meta or {}))
            self._timeline.check(view.version)
            self._words[Head.CLAIMED] = view.version  # announce ...
            linux.membarrier()
            try:
                self._wait_for_readers(raw, deadline)  # ... look
                if self._ledger[self._at + Cell.WORD] < view.version - 1 and self._last != self.backend.stream_key(raw):
                    before = [(self._at + Cell.WORD, view.version - 1)]
                    self.behind(raw, self.session.ledger.region, before, deadline)
            except BaseException:
                self._words[Head.CLAIMED] = view.version - 1  # nothing was written: the old version is as it was
                raise
            try:
                with current(self.backend, raw):
                    yield view
                self._store_meta(view.meta)
                self._timeline.record(raw)
                self._last = self.backend.stream_key(raw)
            except BaseException as error:
                self.session.condemn_own(self._timeline, error)
                raise
            finally:
                view._arrays = None
        finally:
            self._writing.release()

    def _take_pen(self, deadline: Deadline) -> None:
        def grant() -> None:
            self.session.request("pen", Pen(self.incarnation), PenReply, deadline)

        if not self._timeline.has_pen:
            self._timeline.take_pen(grant)

    def _store_meta(self, meta: dict[str, Any]) -> None:
        raw = encode_meta(meta, self._words[Head.META_BYTES], self.name)
        start = self.control.meta_at()
        self.control.region.bytes[start : start + len(raw)] = raw
        self._words[Head.META_LEN] = len(raw)

    def _wait_for_readers(self, raw: RawStream, deadline: Deadline) -> None:
        """The host waits until no host reads, then puts the stream behind what their devices still do."""
        with self.session.waits.host.of(SPACE, self._timeline.cell, self.version + 1, self.name) as waiting:
            waits = self._await_readers(deadline, waiting.still)
        self.behind(raw, self.control.region, waits, deadline)

    def _await_readers(self, deadline: Deadline, still: Callable[[], None]) -> list[tuple[int, int]]:
        """Returns once no host reads: the words and values that their devices still have to reach."""
        control, words, token = self.control, self._words, 0
        while True:
            busy: set[int] = set()
            waits = []
            for cell in range(control.max_readers):
                at = control.reader(cell)
                if words[at + Reader.STATE] == Reader.FREE:
                    continue
                for lane in range(at, at + Reader.LANES):
                    begun = words[lane + Reader.BEGUN]
                    if words[lane + Reader.RELEASED] < begun:
                        busy.add(words[at + Reader.OWNER] - 1)
                    elif words[lane + Reader.DONE] < begun:
                        waits.append((lane + Reader.DONE, begun))
            dead = {block for block in busy if self.session.ledger.dying(block)}
            for block in dead:
                self.session.suspect(block)
            if busy <= dead:
                return waits
            self._timeline.check(self.version + 1)
            left = deadline.left()
            if left == 0.0:
                raise WaitTimeout(
                    f"readers still hold version {self.version} of {self.name!r} after {deadline.timeout:g} s",
                    timeout=deadline.timeout,
                )
            if token:  # announced before this look
                bells.sleep(control.region, Head.DOORBELL, token, left)
                still()
                token = 0
            else:
                token = bells.announce(control.region, Head.DOORBELL)

    def behind(self, raw: RawStream, region: Region, waits: Sequence[tuple[int, int]], deadline: Deadline) -> None:
        """The stream goes on once each (word, value) is reached."""
        if not self.backend.is_thread(raw):
            self.session.enqueue_waits(self.backend, raw, region, waits, deadline, self.name)
            return
        for word, value in waits:
            wait_word(
                region,
                word,
                value,
                deadline,
                check=self.session.check,
                what=lambda: f"streams' work on {self.name!r}",
                polled=self.backend.device_writes,
            )

    def release(self, timeout: Timeout = UNSET) -> None:
        """Lets another process write, once what was published is complete."""
        self._drop_pen(self.session.deadline(timeout))

    def _drop_pen(self, deadline: Deadline) -> None:
        def give_back() -> None:
            self.session.request("pen_back", PenBack(self.incarnation), Empty, deadline)

        self._timeline.drop_pen(deadline, give_back)

    # -- reading

    @contextlib.contextmanager
    def read(self, stream: Any = None, *, timeout: Timeout = UNSET) -> Iterator[View]:
        """Holds the version published last: nobody writes before the block has ended, on `stream`.

        A version being written is waited for, `timeout` seconds at most on the host. So is the first one, unless the
        array was made by ``share``: then version 0 is what it held. Host arrays are read-only. ``PeerDied`` or
        ``PeerFailed``: a writer died or raised in ``write``; also at the end of the block, if it did so meanwhile.
        """
        self._check()
        raw = self.session.reading_stream(stream, self.device)
        deadline = self.session.deadline(timeout)
        self._readers.join(deadline)
        with self._readers.lane(raw, deadline) as lane:
            version = self._begin(lane, deadline)
            view = None
            try:
                self._timeline.wait(raw, version, deadline)
                length = self._words[Head.META_LEN]
                start = self.control.meta_at()
                meta = decode_meta(bytes(self.control.region.bytes[start : start + length])) if length else {}
                view = View(raw, version, self._views(writable=False), meta)
                with current(self.backend, raw):
                    yield view
            finally:
                if view is not None:
                    view._arrays = None
                self._end(lane, raw)
            self._timeline.check(version)

    def _begin(self, lane: int, deadline: Deadline) -> int:
        """Announces a read in that lane and returns the version it is of."""
        words, issued = self._words, self._at + Cell.ISSUED
        first = 0 if self.spec.memory == "session" else 1
        while True:
            words[lane + Reader.BEGUN] += 1
            claimed = max(words[Head.CLAIMED], first)
            if self._ledger[issued] >= claimed:
                if not self._readers.attached:
                    raise StaleHandle(f"this session was taken for stopped: its reader of {self.name!r} was detached")
                return int(self._ledger[issued])
            words[lane + Reader.BEGUN] -= 1
            self._readers.ring()
            self._await(claimed, deadline)

    def _await(self, claimed: int, deadline: Deadline) -> None:
        """Returns once that version was published, or its writer gave up before it wrote."""

        def check() -> None:
            self._timeline.between_slices(claimed)
            if self._words[Head.CLAIMED] < claimed != 1:
                raise _GaveUp

        try:
            wait_word(
                self.session.ledger.region,
                self._at + Cell.ISSUED,
                claimed,
                deadline,
                check=check,
                what=lambda: f"version {claimed} of {self.name!r}",
                waiting=lambda: self.session.waits.host.of(ISSUED, self._timeline.cell, claimed, self.name),
            )
        except _GaveUp:
            pass

    def _end(self, lane: int, raw: RawStream) -> None:
        words = self._words
        begun = words[lane + Reader.BEGUN]
        if self.backend.is_thread(raw):
            words[lane + Reader.DONE] = begun
        else:
            self.backend.write(
                raw, self.control.region, lane + Reader.DONE, begun, failed=lambda _: self._force(lane, begun)
            )
        words[lane + Reader.RELEASED] = begun
        self._readers.ring()

    def _force(self, lane: int, begun: int) -> None:
        """The stream's work raised: it takes no more, so it reads no more."""
        self._words[lane + Reader.DONE] = begun
        self.control.wake(lane + Reader.DONE)

    # -- the arrays

    def _views(self, *, writable: bool) -> dict[str, Any]:
        with self._setup:
            if writable and self._own is not None:
                return self._own
            found = self._arrays.get(writable)
            if found is None:
                memory = [
                    opening.memory(self.session, self.backend, self.index, m, self.name, writable=writable)
                    for m in self.info.memory
                ]
                self._memory += memory
                found = self._arrays[writable] = {
                    f.name: self.backend.array(memory[f.region], f.offset, f.shape, f.dtype, f.strides)
                    for f in self.spec.fields
                }
            return found

    # -- the end

    def close(self, timeout: Timeout = UNSET) -> None:
        """Lets the array go: waits for this process's own work on it. Memory given to ``share`` stays its owner's.
        Idempotent."""
        self._shutdown(self.session.deadline(timeout))

    def __enter__(self) -> SharedArray:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        self.session.check()
        if self._closed:
            raise InvalidState(f"the array {self.name!r} was closed here: open it again")

    def _held(self) -> dict[str, Any]:
        held = {"kind": "array", "name": self.name, "incarnation": self.incarnation, "cell": self.info.event.cell}
        return {**held, "pen": self._timeline.has_pen}

    def _shutdown(self, deadline: Deadline) -> None:
        with self._setup:
            if self._closed:
                return
            self._closed = True
        failure = None
        try:
            self._readers.leave(deadline)
            self._drop_pen(deadline)
        except (PeerDied, ResourceLost):
            pass  # condemned: nothing to drain
        except IpcSyncError as error:
            failure = error

        def quiet() -> bool:
            timeline = self._timeline
            complete = timeline.completed >= timeline.issued or timeline.verdict <= timeline.issued
            return complete and timeline.quiet() and self._readers.quiet()

        if self.session.forget(self):
            self.session.detach(self.incarnation, quiet, deadline)
        self._arrays.clear()
        if quiet():  # else a stream is still at it, and the process's end must free it
            for memory in self._memory:
                self.backend.free(memory)
            self.backend.unregister(self.control.region)
        if failure is not None:
            raise failure


class _GaveUp(Exception):
    """The writer that had announced a version did not begin it."""
