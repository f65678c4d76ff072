"""What a writer or a reader has of a channel, and how that is given back: by ``close()``, by the end of the session, or
because whoever had the :class:`Writer` or :class:`Reader` dropped it without a word.

The channel keeps a place, its user only the front. Every array of the front's shares an anchor: when it is gone the
front is, and every slot and array too, so nothing can be used any more. The collector may find that in any thread, at
any moment, with any lock held. So nothing happens there but a note to the session's I/O thread, which has a thread do
what ``close()`` does.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections.abc import Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from . import failpoints, trace
from .crossing import Crossing
from .epochs import Epochs
from .errors import IpcSyncError, StreamFailed, WaitTimeout
from .groups import SharedTurn
from .ledger import FOREVER
from .turns import LatestTurn, Turn
from .waiting import UNSET, Deadline, wait_word
from .wire import Empty, LeaveReader, LeaveWriter, ReaderReply, WriterReply

if TYPE_CHECKING:
    from .backends.base import RawStream
    from .channel import Channel, Views
    from .session import Session
    from .slot import ReadSlot


_SETTLE = 2.0  # seconds


class Place:
    """A writer's or reader's. ``closed`` once it was left, in whatever way."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.session = channel, channel.session
        self.backend, self.control = channel.backend, channel.control
        self.threaded = self.backend.is_thread(None)  # where no stream is the calling thread
        self.closed = False
        self._anchor: weakref.ref[Any] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, views: Views) -> None:
        """The front uses these arrays: once nobody can any more, the place is left."""
        soon, abandoned, ending = self.session.link.soon, self._abandoned, sys.is_finalizing
        self._anchor = weakref.ref(views.anchor, lambda _: None if ending() else soon(abandoned))

    def _abandoned(self) -> None:
        """The I/O thread, which must not wait for anything."""
        if not self.closed:
            try:
                thread = threading.Thread(target=self._let_go, name="ipcsync-let-go", daemon=True)
                thread.start()
                self._thread = thread
            except RuntimeError:
                pass  # the interpreter is ending, and with it the session

    def settle(self, deadline: Deadline) -> None:
        """For the channel's end: what a thread has begun to let go, it has let go or given up."""
        if self._thread is not None:
            self._thread.join(deadline.left(_SETTLE))

    def _let_go(self) -> None:
        try:
            self.abandon(self.session.deadline(UNSET))
        except IpcSyncError:
            pass  # nobody is there to be told, and what is not drained is the session's to end

    def abandon(self, deadline: Deadline) -> None:
        raise NotImplementedError

    def shutdown(self, deadline: Deadline) -> None:
        """The channel or the session is closed."""
        raise NotImplementedError

    def quiet(self) -> bool:
        """Whether no stream of this process is still at the channel's memory or words."""
        raise NotImplementedError


def warn_of_unclosed(front: Any, place: Place | None, fix: str) -> None:
    """For a front's ``__del__``; `place` is None where its constructor did not get that far."""
    if place is not None and not place.closed and place.session._refusal is None:
        warnings.warn(f"unclosed {front!r}: {fix}", ResourceWarning, stacklevel=2, source=front)


class ReaderPlace(Place):
    """A reader's: its turn, the epoch it is in, and the items that it has taken and not released."""

    def __init__(self, channel: Channel, reply: ReaderReply, *, policy: str, group: str | None) -> None:
        super().__init__(channel)
        kind = SharedTurn if group else LatestTurn if policy == "latest" else Turn
        self.turn = kind(self.control, reply.cell, reply.start)
        self.crossing = Crossing(self.control.region)
        self.epochs = Epochs(channel, self.turn.next)
        #: By buffer: what was taken and not released. Not the slots themselves, which keep the front: else a front that
        #: was dropped with an item would be a cycle, and stay until the collector's next round.
        self.held: dict[int, tuple[RawStream, int, weakref.ref[ReadSlot]]] = {}
        self.unconfirmed = 0  # the last item taken in this epoch; 0 when there is none to be looked at
        self._words = self.control.words
        #: Whoever writes the words of our cell, for once we have left they are another's.
        self.ours = threading.RLock()

    def release(self, slot: ReadSlot, stream: Any) -> None:
        """Ends the slot's turn, on `stream`, or on the one it was taken on."""
        if failpoints.ARMED:
            failpoints.hit("slot.release")
        with self.ours:
            if slot._arrays is None:
                return  # the place was left meanwhile, and it was released then
            b = slot._buffer
            self._give_back(b, slot.number, slot._raw, stream)  # first: if that is no stream, it is held as before
            slot._arrays = None
            self.held.pop(b, None)
        recorder = trace.ACTIVE
        if recorder is not None:
            recorder.released(slot, self.channel.name, "in", slot.number)

    def _give_back(self, b: int, number: int, raw: RawStream, stream: Any = None) -> None:
        done, backend, device = self.turn.done + b, self.backend, self.channel.device
        if stream is not None:
            crossing = self.crossing.stream(stream) if device.type == "cpu" else None
            backend, raw = crossing or (backend, self.session.reading_stream(stream, device))
        if raw is None and self.threaded:
            self._words[done] = number
        elif self._words[done] >= number:  # what a dead one left in our cell: the word cannot say when we are done
            backend.stream_synchronize(raw)
        else:
            backend.write(raw, self.control.region, done, number, failed=lambda _: self._force(done, number))
        self.turn.release(b, number)

    def _force(self, done: int, number: int) -> None:
        """The stream's work raised: it takes no more, so it is done with the buffer."""
        self._words[done] = number
        self.control.wake(done)

    def _stop(self) -> bool:
        """Releases what is held and takes no more. False where that was done before."""
        with self.ours:
            if self.closed:
                return False
            self.closed = True
            for b, (raw, number, found) in list(self.held.items()):
                slot = found()
                if slot is not None:
                    self.release(slot, None)
                else:
                    self._give_back(b, number, raw)
            self.held.clear()
            self.turn.stop()
            return True

    def shutdown(self, deadline: Deadline) -> None:
        if not self._stop():
            return
        try:
            number, bad = self.unconfirmed, self.epochs.bad
            if number and bad == FOREVER:
                self.epochs.timeline.wait_host(number, deadline)
            elif number and bad <= number:
                raise self.epochs.timeline.error()
        finally:
            self._leave(deadline)

    def abandon(self, deadline: Deadline) -> None:
        if self._stop():
            self._leave(deadline)  # what was not confirmed is of no more interest to anybody

    def _leave(self, deadline: Deadline) -> None:
        turn, words = self.turn, self._words
        for b in range(self.control.depth):
            wait_word(
                self.control.region,
                turn.done + b,
                words[turn.released + b],
                deadline,
                check=self.session.check,
                what=lambda: f"this process's own work on the items it released of {self.channel.name!r}",
                polled=self.backend.device_writes or self.crossing.used,
            )
        if self.quiet():
            self.crossing.close()
            self.channel.left(self)
        request = LeaveReader(self.channel.incarnation, turn.cell)
        self.session.request("leave_reader", request, Empty, deadline)
        turn.close()

    def quiet(self) -> bool:
        turn, words = self.turn, self._words
        done = all(words[turn.done + b] >= words[turn.released + b] for b in range(self.control.depth))
        return done and self.epochs.timeline.quiet()


class WriterPlace(Place):
    """The writer's: its pen, and the buffers that its streams may still write."""

    def __init__(self, channel: Channel, reply: WriterReply) -> None:
        super().__init__(channel)
        self.epoch = reply.epoch
        self.timeline = channel.session.open_timeline(reply.event)
        self.timeline.take_pen(lambda: None)  # the broker granted it when we joined
        self.open: dict[int, RawStream] = {}  # of each buffer whose slot's turn is now
        #: Of each buffer: the stream that left it unpublished, and an event behind that.
        self.left: dict[int, tuple[Hashable, Any]] = {}
        self.lock = threading.RLock()

    def put_back(self, b: int, raw: RawStream) -> None:
        """Nothing is published in the buffer, which the stream may still be writing."""
        self.open.pop(b, None)
        if not self.backend.is_thread(raw):
            event = self.backend.event_create(self.channel.index, timing=False, blocking=False, interprocess=False)
            self.backend.event_record(event, raw)
            self.left[b] = self.backend.stream_key(raw), event

    def shutdown(self, deadline: Deadline) -> None:
        self.leave(unsaid(self.session), deadline)

    def abandon(self, deadline: Deadline) -> None:
        """Whether the stream has ended nobody said, so it has not: another may write on. If nobody does, it ends with
        the channel, as it does with a writer that was kept."""
        self.channel.abandoned = (self.epoch, self.timeline.issued)  # while we have the pen
        self.leave("", deadline)

    def quiet(self) -> bool:
        timeline = self.timeline
        return timeline.quiet() and (timeline.completed >= timeline.issued or timeline.verdict <= timeline.issued)

    def leave(self, end: Any, deadline: Deadline) -> None:
        """Gives the pen back, if that was not done before: the stream is "closed", "failed", or ("") goes on."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for b, raw in list(self.open.items()):
                with suppress(StreamFailed):  # then the stream does no more
                    self.put_back(b, raw)
        for _, event in self.left.values():
            if not end:  # the next writer must not meet what our streams still write and never published
                self._finished(event, deadline)
            self.backend.event_destroy(event)
        request = LeaveWriter(self.channel.incarnation, end)

        def give_back() -> None:
            self.session.request("leave_writer", request, Empty, deadline)

        if end == "failed":
            # No waiting behind an exception: the broker takes the pen when the last item is complete.
            self.session.link.post("leave_writer", request)
        else:
            try:
                self.timeline.drop_pen(deadline, give_back)
            except IpcSyncError:  # condemned, or not complete in time: the broker takes the pen when it can
                self.session.link.post("leave_writer", request)
                raise
        if self.quiet():
            self.channel.left(self)

    def _finished(self, event: Any, deadline: Deadline) -> None:
        while not self.backend.event_query(event):
            self.session.check()
            if deadline.left() == 0.0:
                raise WaitTimeout(f"this process's streams still write discarded slots of {self.channel.name!r}")
            time.sleep(200e-6)


def unsaid(session: Session) -> Literal["closed", "failed"]:
    """How a stream ends with its session whose writer said nothing: an exception that ends the session's block, or the
    program, is no good end."""
    raised = session._failed or (hasattr(sys, "last_value") and not hasattr(sys, "ps1"))
    return "failed" if raised else "closed"
