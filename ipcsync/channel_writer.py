"""A channel's writer: finds a free buffer, hands it out, publishes it on the stream.

An item exists once its round is issued. Until then nothing of it can be seen: an exception in the slot's block, or
``discard()``, leaves the readers with what they had.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from . import bells, failpoints, trace
from .channel_place import WriterPlace, warn_of_unclosed
from .epochs import stands
from .errors import InvalidState, IpcSyncError, WaitTimeout
from .host_waits import SPACE
from .ledger import Cell
from .ring import Buffer, Head
from .slot import WriteSlot, encode_meta
from .stream import _thread as current_streams
from .turns import Choice, publish
from .waiting import SLICE, UNSET, Deadline, Timeout, slept, spin, wait_word

if TYPE_CHECKING:
    from .backends.base import RawStream


class Writer:
    """The channel's one writer. Made by ``channel.writer()``.

    Leaving it by ``with`` (or ``close()``) ends the stream: readers get ``EndOfStream`` after the last item. Leaving it
    by an exception ends it with ``PeerFailed``. ``detach()`` leaves without ending it: another may write on.
    """

    def __init__(self, place: WriterPlace) -> None:
        self.channel, self.session, self.device = place.channel, place.session, place.channel.device
        self.epoch = place.epoch
        self._backend, self._control = place.backend, place.control
        self._threaded = place.threaded
        self._words, self._ledger = self._control.words, self.session.ledger.words
        self._timeline, self._at = place.timeline, place.timeline.at
        self._views = self.channel.views(writable=True)
        self._choice = Choice(self._control)
        self._streams: dict[int, Hashable] = {}  # of each buffer: the stream that wrote its item
        self._left, self._open, self._lock = place.left, place.open, place.lock
        place.watch(self._views)
        self._place = place

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # or a module's names may be gone
            fix = "leave it by `with channel.writer() as writer:`, close() (the stream ends) or detach() (it goes on)"
            warn_of_unclosed(self, self.__dict__.get("_place"), fix)

    def __repr__(self) -> str:
        return f"<ipcsync.Writer of {self.channel.name!r}, epoch {self.epoch}>"

    def slot(self, stream: Any = None, meta: Mapping[str, Any] | None = None, *, timeout: Timeout = UNSET) -> WriteSlot:
        """A turn with a free buffer, as a context manager; published on `stream` when its block ends.

        The host waits, `timeout` seconds at most, only when every buffer is in use. `meta`: see ``slot.meta``.
        """
        if stream is None and self._threaded and not current_streams.stack:
            return WriteSlot(self, None, meta, timeout)  # on the calling thread itself
        return WriteSlot(self, self.session.stream(stream, self.device), meta, timeout)

    def stands(self, epoch: int, number: int) -> bool:
        """Whether the item that writer `epoch` (``slot.epoch``) began as `number` was published, and not condemned by
        its death: what a writer that takes over has to know of the dead one's last item."""
        return stands(self._control, self.epoch, self._ledger[self._at + Cell.ISSUED], epoch, number)

    # -- a slot's turn

    def _begin(self, slot: WriteSlot) -> None:
        if slot._buffer >= 0 or isinstance(slot._extents, dict):
            raise InvalidState("this slot had its turn: take another with writer.slot()")
        timeout = slot._extents
        deadline = None if timeout is UNSET else self.session.deadline(timeout)  # most turns need none
        self._check()
        with self._lock:
            found = self._choice.pick()
        if found is None:
            deadline = deadline or self.session.deadline()
            found = self._await_space(deadline)
        b, waits = found
        ledger, at = self._ledger, self._at
        if waits or self._left or ledger[at + Cell.WORD] < self._choice.items[b]:
            try:
                self._behind(slot._raw, b, waits, deadline or self.session.deadline())
            except BaseException:
                with self._lock:
                    self._choice.put_back(b)
                raise
        slot._extents = {}
        slot._buffer, slot._arrays = b, self._views[b]
        if slot._raw is not None:
            self._open[b] = slot._raw
        slot.number = ledger[at + Cell.ISSUED] + 1
        recorder = trace.ACTIVE
        if recorder is not None:
            recorder.opened(slot)

    def _pick(self) -> tuple[int, list[tuple[int, int]]] | None:
        with self._lock:
            return self._choice.pick()

    def _await_space(self, deadline: Deadline) -> tuple[int, list[tuple[int, int]]]:
        number = self._ledger[self._at + Cell.ISSUED] + 1
        with self.session.waits.host.of(SPACE, self._timeline.cell, number, self.channel.name) as waiting:
            return self._look_for_space(deadline, waiting.still)

    def _look_for_space(self, deadline: Deadline, still: Callable[[], None]) -> tuple[int, list[tuple[int, int]]]:
        region, token, asleep = self._control.region, 0, 0
        found, looked = spin(self._pick), time.monotonic()
        while True:
            self._check()
            found = found or self._pick()
            if found is not None:
                if asleep:
                    slept(time.monotonic_ns() - asleep)
                return found
            left = deadline.left()
            if left == 0.0:
                raise WaitTimeout(
                    f"no buffer of {self.channel.name!r} became free within {deadline.timeout:g} s: all "
                    f"{self._control.depth} are in use by readers, or by this writer's own open slots",
                    timeout=deadline.timeout,
                )
            if token:  # announced before this look
                asleep = asleep or time.monotonic_ns()
                bells.sleep(region, Head.DOORBELL, token, left)
                still()
                if time.monotonic() - looked >= SLICE:  # readers wake us far more often than they die
                    self._look_for_deaths()
                    looked = time.monotonic()
                token = 0
            else:
                token = bells.announce(region, Head.DOORBELL)

    def _check(self) -> None:
        if self._place.closed:
            self.channel.refuse("writer")
        self._timeline.check(self._ledger[self._at + Cell.ISSUED] + 1)

    def _look_for_deaths(self) -> None:
        """A reader whose process is dead does not hold the writer, whether a broker lives to see it or not."""
        ledger = self.session.ledger
        with self._lock:
            dead = {block for block in self._choice.blockers() if ledger.dying(block)}
            self._choice.dead = dead
        for block in dead:
            self.session.suspect(block)

    def _behind(self, raw: RawStream, b: int, waits: list[tuple[int, int]], deadline: Deadline) -> None:
        """Puts the buffer's next use behind its last: readers' device work, and our own on another stream."""
        backend, key = self._backend, self._backend.stream_key(raw)
        region = self._control.region
        if waits:
            self._wait(raw, region, waits, deadline)
        item = self._choice.items[b]
        if self._ledger[self._at + Cell.WORD] < item and self._streams.get(b) != key:
            self._wait(raw, self.session.ledger.region, [(self._at + Cell.WORD, item)], deadline)
        left = self._left.pop(b, None)
        if left is not None:
            if left[0] != key:
                backend.event_wait(left[1], raw)
            backend.event_destroy(left[1])

    def _wait(self, raw: RawStream, region: Any, waits: list[tuple[int, int]], deadline: Deadline) -> None:
        name, backend = self.channel.name, self._backend
        if not backend.is_thread(raw):
            self.session.enqueue_waits(backend, raw, region, waits, deadline, name)
            return
        what = f"the readers' streams' work on a buffer of {name!r}"
        for word, value in waits:
            wait_word(region, word, value, deadline, check=self._check, what=lambda: what, polled=backend.device_writes)

    def _publish(self, slot: WriteSlot) -> None:
        b, at, words = slot._buffer, self._control.buffers[slot._buffer], self._words
        with self._lock:
            try:
                self._check()
                number, sizes = self._ledger[self._at + Cell.ISSUED] + 1, 0
                if slot.meta:
                    meta = encode_meta(slot.meta, self.channel.meta_bytes, self.channel.name)
                    start, sizes = self._control.meta_at(b), len(meta)
                    self._control.region.bytes[start : start + sizes] = meta
                if slot._extents:
                    sizes |= self._store_extents(slot, at)
                words[at + Buffer.SIZES] = sizes
                words[at + Buffer.PUBLISHED] = published = time.monotonic_ns()
                publish(self._control, b, number, self.epoch)
                if failpoints.ARMED:
                    failpoints.hit("slot.publish")
                self._timeline.record(slot._raw)
            except BaseException:
                words[at + Buffer.ITEM] = self._choice.items[b]
                self._put_back(slot)
                raise
            slot.number = number
            slot._arrays = None
            self._open.pop(b, None)
            self._streams[b] = self._backend.stream_key(slot._raw)
            self._choice.keep(b, number)
        recorder = trace.ACTIVE
        if recorder is not None:
            recorder.published(self.channel.name, number, published)
            recorder.released(slot, self.channel.name, "out", number)

    def _put_back(self, slot: WriteSlot) -> None:
        slot._arrays, slot.number = None, None
        recorder = trace.ACTIVE
        if recorder is not None:
            recorder.released(slot, self.channel.name, "out", None)
        b = slot._buffer
        self._place.put_back(b, slot._raw)
        with self._lock:
            self._choice.put_back(b)

    def _store_extents(self, slot: WriteSlot, at: int) -> int:
        """Stores the item's extents behind the buffer's record; returns the mark of that in its SIZES."""
        assert isinstance(slot._extents, dict)
        at += Buffer.EXTENTS
        for spec in self.channel.spec.fields:
            for n in slot._extents.get(spec.name, spec.shape):
                self._words[at] = n
                at += 1
        return 1 << 32

    # -- leaving

    def close(self, timeout: Timeout = UNSET) -> None:
        """Ends the stream: waits until what was issued is complete, then readers get ``EndOfStream`` after it.
        Idempotent."""
        self._place.leave("closed", self.session.deadline(timeout))

    def detach(self, timeout: Timeout = UNSET) -> None:
        """Leaves without ending the stream: readers wait for whoever becomes its writer next."""
        self._place.leave("", self.session.deadline(timeout))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self._place.leave("closed" if kind is None else "failed", self.session.deadline(UNSET))
        except IpcSyncError as secondary:
            if error is None:
                raise
            error.add_note(f"and leaving the writer of {self.channel.name!r}: {secondary}")
