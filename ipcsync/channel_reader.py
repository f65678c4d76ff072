"""A channel's reader: takes items in turn, holds them, gives them back on the stream.

Nothing here waits for the device but ``confirm`` and ``close``: a turn's end only looks whether the item has been
condemned meanwhile. What was never confirmed is looked at again at the next turn, and waited for in ``close``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

from . import bells, failpoints, trace
from .channel_place import ReaderPlace, warn_of_unclosed
from .errors import EndOfStream, InvalidState, IpcSyncError, PeerDied, StaleHandle, WaitTimeout
from .host_waits import ISSUED
from .ledger import Cell
from .ring import Buffer, Head
from .ring import Reader as Words
from .slot import ReadSlot
from .stream import _thread as current_streams
from .waiting import UNSET, Deadline, Timeout, wait_word

if TYPE_CHECKING:
    from .backends.base import RawStream
    from .channel import Views


class Reader:
    """One reader of a channel. Made by ``channel.reader()``; leave it by ``with`` or ``close()``.

    ``skipped`` counts what a ``latest`` reader missed in all.
    """

    def __init__(self, place: ReaderPlace, *, policy: str, group: str | None, wait: bool, pin: bool) -> None:
        self.channel, self.session, self.device = place.channel, place.session, place.channel.device
        self.policy, self.group, self.on_writer_death = policy, group, "wait" if wait else "raise"
        self.skipped = 0
        self._backend, self._control = place.backend, place.control
        self._threaded = place.threaded
        self._words, self._bytes = self._control.words, self._control.region.bytes
        self._turn, self._epochs, self._held = place.turn, place.epochs, place.held
        self._lock = threading.Lock()
        self._over: IpcSyncError | None = None  # what every further get() raises
        views = place.channel.views(writable=False)
        if pin:
            place.crossing.pin(views.memory)
        self._place = place
        self._use(views)

    def _use(self, views: Views) -> None:
        """From now on its slots have these arrays."""
        self._place.watch(views)
        self._views = views

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # or a module's names may be gone
            fix = "leave it by `with channel.reader() as reader:`, or close()"
            warn_of_unclosed(self, self.__dict__.get("_place"), fix)

    def __repr__(self) -> str:
        return f"<ipcsync.Reader of {self.channel.name!r}, next item {self._turn.next}>"

    # -- taking

    def get(self, stream: Any = None, timeout: Timeout = UNSET) -> ReadSlot:
        """The next item, held until it is released (it is a context manager): `stream` waits for it on the device.

        The host waits, `timeout` seconds at most (``WaitTimeout``), until the item is published. ``EndOfStream`` after
        the last one; ``PeerDied`` when the writer died, ``PeerFailed`` when it was left by an exception. The stream
        may be another GPU's: its device is current in the turn, and ``slot.array`` stays where it is.

        In a group, ``EndOfStream`` is known when no other member holds an item. ``InvalidState`` if this one holds one
        itself by then, since the others may wait for it: release it and call again.
        """
        session = self.session
        if stream is None and self._threaded and not current_streams.stack:
            raw = None  # the calling thread itself
        else:
            raw = session.reading_stream(stream, self.device)
        deadline = None if timeout is UNSET else session.deadline(timeout)  # most turns need none
        if not self._lock.acquire(False):
            deadline = deadline or session.deadline()
            if not self._lock.acquire(timeout=deadline.left(threading.TIMEOUT_MAX)):
                raise WaitTimeout(f"another thread is in get() of {self.channel.name!r}", timeout=deadline.timeout)
        try:
            while True:
                found = self._look()
                if found is None:
                    deadline = deadline or session.deadline()
                    found = self._await(deadline)
                with self._place.ours:
                    before = self._place.unconfirmed
                    slot = self._take(raw, *found)
                if slot is None:
                    continue
                try:
                    timeline = self._epochs.timeline
                    if not timeline.wait_now(raw, slot.number):
                        timeline.wait(raw, slot.number, deadline or session.deadline())
                except PeerDied:
                    self._place.release(slot, None)
                    self._place.unconfirmed = before
                    if self.on_writer_death == "raise":
                        self._turn.stop()
                        raise
                    continue  # never handed out: on to the next writer
                except BaseException:
                    with self._place.ours:
                        if not self._place.closed:
                            self._place.unconfirmed = before
                            slot._arrays = None  # not delivered: the next get() takes it again
                            self._held.pop(slot._buffer, None)
                            self._turn.undo(slot._buffer, slot.number)
                    raise
                if failpoints.ARMED:
                    failpoints.hit("slot.taken")
                recorder = trace.ACTIVE
                if recorder is not None:
                    recorder.taken(slot, self.channel.name, slot.number, slot.published)
                return slot
        finally:
            self._lock.release()

    def slots(self, stream: Any = None, timeout: Timeout = UNSET) -> Iterator[ReadSlot]:
        """Every item until the stream ends, each released when its turn of the loop ends. `timeout` is per item."""
        while True:
            try:
                slot = self.get(stream, timeout)
            except EndOfStream:
                return
            with slot:
                yield slot

    __iter__ = slots

    def slots_async(self, stream: Any = None, timeout: Timeout = UNSET) -> AsyncIterator[ReadSlot]:
        """``async for slot in reader.slots_async():`` like `slots`, but an event loop does not stand still meanwhile.
        Cancelling it takes no item and leaves nothing behind."""
        from .many import slots

        return slots(self, stream, timeout)

    def ready(self) -> bool:
        """Whether `get` would find an item, or raise what ended the stream, without waiting for a writer."""
        self._follow()
        epochs, turn = self._epochs, self._turn
        number, bad = turn.next, epochs.bad
        if self._place.closed or self._over is not None:
            return True
        if bad <= self._place.unconfirmed or turn.ready(epochs.issued, bad):
            return True
        if number >= bad:
            return self.on_writer_death == "raise" or epochs.over or epochs.ended(number)
        if epochs.ended(number):
            return bool(self._held) or not turn.peers_hold()
        return epochs.over

    def _follow(self) -> None:
        """Goes on to the writer that took over, once there is nothing left of the last to take or to be told of: it
        may have no item yet, and then there is nothing for `get`."""
        if self.on_writer_death == "raise" or not self._lock.acquire(blocking=False):
            return
        try:
            epochs, turn = self._epochs, self._turn
            while not self._place.closed and self._over is None and epochs.over:
                bad = epochs.bad
                if bad <= self._place.unconfirmed or turn.ready(epochs.issued, bad) or epochs.ended(turn.next):
                    return
                turn.move_to(epochs.follow() + 1)
        finally:
            self._lock.release()

    def arrived(self, *, complete: bool) -> bool:
        """`ready`, and with `complete` that the item is complete as well. Looks for the writer's death."""
        self._follow()
        epochs, bad = self._epochs, self._epochs.bad
        number = min(epochs.issued, bad - 1) if self.policy == "latest" else self._turn.next
        if not self.ready():
            try:
                if number < bad:
                    epochs.timeline.between_slices(number)
                self.session.check()
            except PeerDied:
                return self.on_writer_death == "raise" or epochs.bad > number  # no verdict, and so no next writer
            except IpcSyncError:
                return True  # for get() to raise
            return False
        if not complete or number > epochs.issued or self._turn.ready(0, bad):
            return True
        return epochs.timeline.completed >= number or bad <= number

    def _look(self) -> tuple[int, int] | None:
        """(the last item issued, the first that is condemned) if there is one to be taken, else None. Raises if nothing
        can be taken any more, or if the last item taken has been condemned."""
        place, session = self._place, self.session
        found = issued, bad = self._epochs.seen()
        if bad <= place.unconfirmed:
            self._settle()
        if place.closed:
            self.channel.refuse("reader")
        if self._over is not None:
            raise self._over
        if session._refusal is not None or session._words[session._lease]:
            session.check()
        return found if self._turn.ready(issued, bad) else None

    def _await(self, deadline: Deadline) -> tuple[int, int]:
        """What :meth:`_look`, which has just found nothing, finds once the next item was issued and may be taken."""
        epochs = self._epochs
        while True:
            number, bad = self._turn.next, epochs.bad
            if number >= bad:
                self._next_writer(deadline)
            elif epochs.ended(number):
                self._end(deadline)
            elif epochs.over:
                self._next_writer(deadline)
            else:
                try:
                    wait_word(
                        self.session.ledger.region,
                        epochs.timeline.at + Cell.ISSUED,
                        number,
                        deadline,
                        check=self._between,
                        what=lambda: f"item {self._turn.next} of {self.channel.name!r}",
                        waiting=lambda: self.session.waits.host.of(
                            ISSUED, epochs.timeline.cell, self._turn.next, self.channel.name
                        ),
                    )
                except _Changed:
                    pass
            found = self._look()
            if found is not None:
                return found

    def _between(self) -> None:
        number, epochs = self._turn.next, self._epochs
        bad = epochs.bad
        if self._place.closed or bad <= number or epochs.ended(number) or epochs.over or self._turn.ready(0, bad):
            raise _Changed
        try:
            epochs.timeline.between_slices(number)
        except PeerDied:
            if epochs.bad <= number:  # since we looked: what that means is for get() to say
                raise _Changed from None
            raise

    def _take(self, raw: RawStream, issued: int, bad: int) -> ReadSlot | None:
        if self._place.closed:
            self.channel.refuse("reader")
        turn, words = self._turn, self._words
        taken = turn.take(issued, bad)
        if taken is None:
            return None
        number, b = taken
        if words[turn.at + Words.STATE] != Words.ACTIVE:
            raise StaleHandle(f"this session was taken for stopped: its reader of {self.channel.name!r} was detached")
        skipped, turn.skipped = turn.skipped, 0
        at = self._control.buffers[b]
        slot = ReadSlot(self, raw, number, words[at + Buffer.EPOCH], skipped)
        slot.published = words[at + Buffer.PUBLISHED]
        if skipped:
            self.skipped += skipped
            words[turn.at + Words.SKIPPED] = self.skipped
        sizes = words[at + Buffer.SIZES]
        arrays = self._views[b]
        if sizes:
            length = sizes & 0xFFFFFFFF
            if length:
                start = self._control.meta_at(b)
                slot._raw_meta = bytes(self._bytes[start : start + length])
            if sizes >> 32:
                arrays = self._smaller(arrays, at + Buffer.EXTENTS)
        slot._buffer, slot._arrays = b, arrays
        if number > self._place.unconfirmed:
            self._place.unconfirmed = number
        self._held[b] = raw, number, ref(slot)
        return slot

    def _smaller(self, arrays: dict[str, Any], at: int) -> dict[str, Any]:
        found = {}
        for spec in self.channel.spec.fields:
            axes = len(spec.shape)
            found[spec.name] = arrays[spec.name][tuple(slice(n) for n in self._words[at : at + axes])]
            at += axes
        return found

    # -- ends

    def _end(self, deadline: Deadline) -> None:
        token = bells.announce(self._control.region, Head.DOORBELL)
        if self._turn.peers_hold():  # one of them may still die, and what it holds come here
            name, group = self.channel.name, self.group
            if self._held:  # they may be here too, and wait for this one
                raise InvalidState(
                    f"{name!r} has ended, and others of the group {group!r} still hold items, which come here if they "
                    f"die; they may be waiting for what this reader holds ({len(self._held)} of its items): release() "
                    "that, then get() again"
                )
            left = deadline.left()
            if left == 0.0:
                raise WaitTimeout(
                    f"{name!r} has ended, but others of the group {group!r} did not release the items that they hold "
                    f"within {deadline.timeout:g} s: release() them there, or close() those readers",
                    timeout=deadline.timeout,
                )
            bells.sleep(self._control.region, Head.DOORBELL, token, left)
            return
        self._over = self._epochs.end()
        raise self._over

    def _next_writer(self, deadline: Deadline) -> None:
        """The writer of this epoch is dead and everything it completed was taken: raises, or waits for the next."""
        epochs = self._epochs
        if self.on_writer_death == "raise" or (self._words[Head.END_AT] and not epochs.over):
            self._over = epochs.timeline.error()
            self._turn.stop()  # no writer after it has to wait for this reader
            raise self._over
        wait_word(
            self._control.region,
            Head.EPOCH,
            epochs.number + 1,
            deadline,
            check=self._no_writer,
            what=lambda: f"a new writer of {self.channel.name!r}, whose last one died,",
        )
        self._turn.move_to(epochs.follow() + 1)

    def _no_writer(self) -> None:
        self.session.check()
        if self._place.closed:
            self.channel.refuse("reader")
        if self._words[Head.END_AT]:
            raise self._epochs.timeline.error()

    def _settle(self) -> None:
        """Raises if the last item taken has been condemned. Items complete in order, so it speaks for all."""
        number = self._place.unconfirmed
        if number and self._epochs.bad <= number:
            self._place.unconfirmed = 0
            if self.on_writer_death == "raise":
                self._turn.stop()
            raise self._epochs.timeline.error()

    def _told(self, slot: ReadSlot) -> None:
        """Its user knows that the item was condemned, and with it whatever came after: that is said once."""
        if slot._timeline is self._epochs.timeline:
            self._place.unconfirmed = 0

    # -- giving back

    def close(self, timeout: Timeout = UNSET) -> None:
        """Releases what is held, waits until everything taken is complete and this device's work on it is done, and
        lets the reader's place go. ``PeerDied`` if something taken and not confirmed was condemned: it is closed then
        as well. Idempotent."""
        self._place.shutdown(self.session.deadline(timeout))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except IpcSyncError as secondary:
            if error is None:
                raise
            error.add_note(f"and closing the reader of {self.channel.name!r}: {secondary}")


class _Changed(Exception):
    """Something that ends a wait for an item is there: look again at what."""
