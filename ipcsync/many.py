"""Waiting for many things at once: ``session.select`` for one worker of several channels, and asyncio.

One futex call of the kernel (futex_waitv) sleeps on many words; where it is not there, and for words that a GPU writes,
which can wake nobody, naps do. A session has one waiter thread for all its coroutines, started by the first.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import bells, linux
from .errors import EndOfStream, InvalidArgument, WaitTimeout
from .host_waits import SEVERAL
from .ledger import Cell
from .ring import Head
from .ring import Reader as Words
from .waiting import SLICE, UNSET, Deadline, Timeout

if TYPE_CHECKING:
    from .channel_reader import Reader
    from .session import Session
    from .slot import ReadSlot
    from .timeline import Timeline

Word = tuple[int, int]  # address, and what was seen there
_NAP = 1e-3


def _words_of(readers: Sequence[Reader]) -> list[Word]:
    """The words that change when one of the readers has something to take, or its stream ends or changes hands."""
    found: list[Word] = []
    for reader in readers:
        control = reader._control
        found.append(_bell_of(reader._epochs.timeline))
        found.append((control.region.address + 8 * Head.EPOCH, control.words[Head.EPOCH]))
    return found


def _bell_of(timeline: Timeline) -> Word:
    """What changes with the event's words. They must be looked at after this."""
    bell = timeline.at + Cell.BELL
    return timeline.region.address + 8 * bell, bells.announce(timeline.region, bell)


def select(session: Session, readers: Sequence[Reader], timeout: Timeout = UNSET) -> list[Reader]:
    """The body of ``Session.select``."""
    if not readers:
        raise InvalidArgument("select() got no readers: it would wait for nothing")
    deadline = session.deadline(timeout)
    polled = any(reader._backend.device_writes for reader in readers)
    words = _words_of(readers)
    if ready := _arrived(session, readers):
        return ready
    first = readers[0]  # a wait that takes long is told as a wait for this one, and in each reader's own words
    cell, number = first._epochs.timeline.cell, first._turn.next
    with session.waits.host.of(SEVERAL, cell, number, first.channel.name) as waiting, _told(readers) as tell:
        while True:
            left = deadline.left(_NAP if polled else SLICE)
            if left == 0.0:
                return []
            linux.futex_wait_any(words, left)
            tell()
            waiting.still()
            words = _words_of(readers)
            if ready := _arrived(session, readers):
                return ready


@contextmanager
def _told(readers: Sequence[Reader]) -> Iterator[Callable[[], None]]:
    """Says in the readers' cells which items are waited for, for ``ipcsync why``; to be called after each sleep."""
    cells = [(reader, reader._control.words, reader._turn.at + Words.AWAITED) for reader in readers]

    def tell() -> None:
        for reader, words, at in cells:
            words[at] = reader._turn.next

    try:
        yield tell
    finally:
        for _, words, at in cells:
            words[at] = 0


def _arrived(session: Session, readers: Sequence[Reader]) -> list[Reader]:
    session.check()
    return [reader for reader in readers if reader.arrived(complete=False)]


class _Wish:
    """What one coroutine waits for."""

    def __init__(self, ready: Callable[[], bool], words: Callable[[], list[Word]], polled: bool) -> None:
        self.ready, self.words, self.polled = ready, words, polled
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def fulfil(self, error: BaseException | None) -> None:
        def tell() -> None:
            if self.future.done():
                return  # cancelled meanwhile
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(tell)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more


class Waiter:
    """A session's thread that waits for the coroutines of all its event loops."""

    def __init__(self) -> None:
        self._wishes: list[_Wish] = []
        self._bell = ctypes.c_uint64(0)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    async def until(
        self, ready: Callable[[], bool], words: Callable[[], list[Word]], deadline: Deadline, what: str, *, polled: bool
    ) -> None:
        """Returns once `ready()` is true, or raises what it raises; ``WaitTimeout`` at the deadline."""
        if ready():
            return
        wish = _Wish(ready, words, polled)
        with self._lock:
            self._wishes.append(wish)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ipcsync-waiter", daemon=True)
                self._thread.start()
        self._ring()
        try:
            left = None if deadline.at is None else deadline.left(1e9)
            async with asyncio.timeout(left):  # wait_for loses a cancellation that meets a result, before Python 3.12
                await wish.future
        except TimeoutError:
            raise WaitTimeout(f"{what} did not come within {deadline.timeout:g} s", timeout=deadline.timeout) from None
        finally:
            with self._lock:
                if wish in self._wishes:
                    self._wishes.remove(wish)

    def _ring(self) -> None:
        self._bell.value += 1
        linux.futex_wake(ctypes.addressof(self._bell))

    def _run(self) -> None:
        while True:
            words: list[Word] = [(ctypes.addressof(self._bell), self._bell.value)]
            with self._lock:
                wishes = list(self._wishes)
                if not wishes:
                    self._thread = None
                    return
            polled = False
            for wish in wishes:
                try:
                    words += wish.words()
                    if not wish.ready():
                        polled |= wish.polled
                        continue
                    error = None
                except BaseException as raised:
                    error = raised
                with self._lock:
                    if wish in self._wishes:
                        self._wishes.remove(wish)
                wish.fulfil(error)
            linux.futex_wait_any(words, _NAP if polled else SLICE)


async def slots(reader: Reader, stream: Any, timeout: Timeout) -> AsyncIterator[ReadSlot]:
    """The body of ``Reader.slots_async``."""
    session = reader.session
    complete = reader._backend.is_thread(session.reading_stream(stream, reader.device))  # then get() waits for that too
    what, polled = f"an item of {reader.channel.name!r}", reader._backend.device_writes
    while True:
        deadline = session.deadline(timeout)
        while True:
            await session.waiter.until(
                lambda: reader.arrived(complete=complete), lambda: _words_of([reader]), deadline, what, polled=polled
            )
            try:
                slot = reader.get(stream, timeout=0)
                break
            except WaitTimeout:
                continue  # another member of its group was faster, or the newest item is not complete yet
            except EndOfStream:
                return
        try:
            yield slot
        finally:
            slot.release()
        reader._settle()


async def synchronize(timeline: Timeline, round: int, deadline: Deadline) -> None:
    """The body of ``SharedEvent.synchronize_async``."""

    def ready() -> bool:
        done = timeline.region.words[timeline.at + Cell.WORD] >= round
        timeline.between_slices(round)
        return bool(done)

    await timeline.session.waiter.until(
        ready,
        lambda: [_bell_of(timeline)],
        deadline,
        f"round {round} of {timeline.name!r}",
        polled=timeline.backend.device_writes,
    )
