"""Reader groups: readers that share a channel's items, each to one of them.

Nobody deals the items out: whoever is free takes the next, so the least loaded gets the most. The members share a
cursor, under a lock of the kernel's (an open file description's, which dies with its process), for a few stores at a
time. A dead member's cell keeps what it had taken and not released, until another takes it over.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from types import TracebackType

from .errors import WaitTimeout
from .ledger import FOREVER
from .ring import Buffer, Control, Group, Head, Reader
from .turns import Turn

_PATIENCE = 5.0  # seconds: the lock is held for microseconds, unless its holder was stopped right then


class _Lock:
    """The group's lock, between threads and processes."""

    def __init__(self, control: Control, offset: int) -> None:
        self._fd = os.open(control.region.path, os.O_RDWR | os.O_CLOEXEC)
        self._offset = offset
        self._threads = threading.Lock()

    def _set(self, kind: int) -> None:
        flock = struct.pack("hhqqi", kind, os.SEEK_SET, self._offset, 8, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, flock)

    def __enter__(self) -> None:
        if not self._threads.acquire(timeout=_PATIENCE):
            raise WaitTimeout("another thread holds the reader group's lock")
        until = time.monotonic() + _PATIENCE
        try:
            while True:
                try:
                    return self._set(fcntl.F_WRLCK)
                except (BlockingIOError, PermissionError):
                    if time.monotonic() > until:
                        raise WaitTimeout(
                            "a stopped member holds the reader group's lock: continue or kill it"
                        ) from None
                    time.sleep(20e-6)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._set(fcntl.F_UNLCK)
        self._threads.release()

    def close(self) -> None:
        os.close(self._fd)


class SharedTurn(Turn):
    """A member's side. ``next`` is the group's: the first item that no member has taken."""

    def __init__(self, control: Control, cell: int, start: int) -> None:
        index = int(control.words[control.reader(cell) + Reader.GROUP]) - 1
        self._index, self._line = index, control.group(index)
        self._lock = _Lock(control, 8 * self._line)
        self._again: list[tuple[int, int]] = []  # taken, but not delivered
        self._epoch = 0
        super().__init__(control, cell, start)

    @property
    def next(self) -> int:
        return int(self.words[self._line + Group.CURSOR])

    @next.setter
    def next(self, number: int) -> None:
        """Only `move_to` and `take` move it."""

    def move_to(self, number: int) -> None:
        with self._lock:
            if self.next < number:
                self.words[self._line + Group.CURSOR] = number

    def ready(self, issued: int, bad: int) -> bool:
        return super().ready(issued, bad) or bool(self._again) or self._orphan(bad) is not None

    def take(self, issued: int, bad: int) -> tuple[int, int] | None:
        words = self.words
        if self._again:
            return self._again.pop()
        with self._lock:
            orphan = self._orphan(bad)
            if orphan is not None:
                released, item, buffer = orphan
                words[self.taken + buffer] = item
                words[self._line + Group.ADOPTED] += 1
                words[released] = item
                return item, buffer
            number = self.next
            if number > issued or number >= bad:
                return None  # another member was faster
            b = self._find(number)
            if b is None:
                raise AssertionError(f"item {number} is in none of the buffers, though its group did not have it yet")
            words[self.taken + b] = number
            words[self._line + Group.CURSOR] = number + 1
            return number, b

    def _orphan(self, bad: int) -> tuple[int, int, int] | None:
        """(the word of its cell that frees it, item, buffer) of the first that a dead member held and can be had."""
        words, control = self.words, self.control
        first: tuple[int, int, int] | None = None
        if not words[Head.REDELIVER]:
            return None
        for cell in control.members(self._index):
            at = control.reader(cell)
            if words[at + Reader.STATE] != Reader.RETIRED or words[at + control.done] != FOREVER:
                continue  # it lives, or is only stopped
            for b in range(control.depth):
                released, number = at + control.released + b, words[at + control.taken + b]
                if words[released] >= number:
                    continue
                if words[self._buffers[b] + Buffer.VOID] == number:
                    words[released] = number  # condemned with its writer: nobody's
                    self.ring()
                elif number < bad and (first is None or number < first[1]):
                    first = released, int(number), b
        return first

    def undo(self, b: int, number: int) -> None:
        self._again.append((number, b))

    def peers_hold(self) -> bool:
        control = self.control
        others = (cell for cell in control.members(self._index) if cell != self.cell)
        return bool(self.words[Head.REDELIVER]) and any(control.holding(cell) for cell in others)

    def close(self) -> None:
        self._lock.close()
