"""How replicas keep the items' order.

The replicas of a stage take items as a group and write each to a channel of its own. With every item goes which one of
the stage's input it was made of, and which one came before that (numbers may have gaps where a writer died). A replica
that writes nothing of an item says so, in an item without content. So a reader of these channels knows of each what it
waits for: it holds what came too early, in its buffers, without a copy.

It can hold as many as there are buffers. So that the item that everybody waits for always finds one, a replica writes
at most ``window`` items ahead of the reader, whose floor (the last item that it finished) is a word of the board:
shared memory that every worker of the run maps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ipcsync import linux, trace
from ipcsync.errors import WaitTimeout

ORDER = "ipcsync.order"  # in the meta of what a replica writes: [number, previous], or [number, previous, 0]: nothing
META_BYTES = 48  # room for it
OVER = (1 << 63) - 1  # the floor of a reader that has left
_SLICE = 0.1


class Made(NamedTuple):
    """Of which item something was made: its number, and the number of the one before it."""

    number: int
    previous: int


class Board:
    """Words that workers tell each other, in a page without a name. Each has one writer, or the supervisor once that
    is gone."""

    def __init__(self, fd: int, words: int) -> None:
        self.fd, size = fd, 8 * max(1, words)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._map = mmap.mmap(fd, size)
        self._words = memoryview(self._map).cast("Q")
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, words: int) -> Board:
        return cls(os.memfd_create("ipcsync-board", os.MFD_CLOEXEC), words)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value
        linux.futex_wake(self._address + 8 * index)

    def sleep(self, index: int, seen: int, seconds: float) -> None:
        """Until the word is not `seen` any more, or that long."""
        linux.futex_wait(self._address + 8 * index, seen, min(seconds, _SLICE))

    def close(self) -> None:
        del self._anchor
        self._words.release()
        self._map.close()
        os.close(self.fd)


class Gate:
    """Keeps a replica within reach of whoever puts its items in order."""

    def __init__(self, board: Board, floors: Sequence[int], window: int) -> None:
        self._board, self._floors, self._window = board, floors, window

    def wait(self, made: Made, timeout: float | None, what: str) -> None:
        """Returns once the item may be written; ``WaitTimeout`` after `timeout` seconds."""
        until, since = None if timeout is None else time.monotonic() + timeout, time.monotonic_ns()
        waited = False
        for index in self._floors:
            # The second for numbers with a gap: the next item there is may always be written.
            while made.number > (floor := self._board[index]) + self._window and made.previous > floor:
                left = _SLICE if until is None else until - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(f"{what}: what was made of earlier items is not finished", timeout=timeout)
                self._board.sleep(index, floor, left)
                waited = True
        if waited and trace.ACTIVE is not None:
            told = {"for": "space", "round": made.number}
            trace.ACTIVE.span("wait", "space behind other replicas", since, args=told)


class Order:
    """Puts what comes from several channels in order."""

    def __init__(self, after: int) -> None:
        self.after = after  # the last item that was given out
        self._early: dict[int, tuple[Made, Any]] = {}  # by the number of the one before

    def add(self, made: Made, item: Any) -> bool:
        """False for what came before: a replica's death made another do it again."""
        if made.number <= self.after or made.previous in self._early:
            return False
        self._early[made.previous] = made, item
        return True

    def pop(self) -> tuple[Made, Any] | None:
        """The next item, if it has come."""
        found = self._early.pop(self.after, None)
        if found is not None:
            self.after = found[0].number
        return found

    @property
    def next(self) -> bool:
        """Whether the next one has come."""
        return self.after in self._early

    @property
    def early(self) -> list[Any]:
        """What still waits for others."""
        return [item for _, item in self._early.values()]
