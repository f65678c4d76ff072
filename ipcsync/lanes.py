"""A shared array's reader cell, and its lanes: which of them a read takes.

Reads end on the device in any order, on any stream, and one word cannot count that. So a read takes a lane whose last
read was on the same stream, which keeps their order, or is over; else its stream first waits for that one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from .backends.base import RawStream
from .errors import WaitTimeout
from .ring import Reader
from .waiting import Deadline, wait_word
from .wire import Empty, JoinReader, LeaveReader, ReaderReply

if TYPE_CHECKING:
    from .shared_array import SharedArray


class Lanes:
    """This session's reader cell of the array (taken at the first read), and which of its lanes are free."""

    def __init__(self, array: SharedArray) -> None:
        self._array = array
        self._cell: int | None = None
        self._streams: list[Hashable] = [None] * Reader.LANES  # whose read was the last of each
        self._busy: set[int] = set()
        self._free = threading.Condition()
        self.at = 0

    def join(self, deadline: Deadline) -> None:
        """Takes a reader cell, at the first read."""
        with self._free:
            if self._cell is None:
                array = self._array
                request = JoinReader(array.incarnation)
                self._cell = array.session.request("join_reader", request, ReaderReply, deadline).cell
                self.at = array.control.reader(self._cell)

    @property
    def attached(self) -> bool:
        return bool(self._array.control.words[self.at + Reader.STATE] == Reader.ACTIVE)

    @contextlib.contextmanager
    def lane(self, raw: RawStream, deadline: Deadline) -> Iterator[int]:
        """A lane for one read on this stream: the index of its words, less BEGUN."""
        array, key = self._array, self._array.backend.stream_key(raw)
        with self._free:
            lane = self._choose(key)
            while lane is None:
                if not self._free.wait(deadline.left(0.05)) and deadline.left() == 0.0:
                    raise WaitTimeout(f"{Reader.LANES} reads of {array.name!r} are open in this process already")
                array.session.check()
                lane = self._choose(key)
            self._busy.add(lane)
        try:
            at = self.at + lane
            if self._streams[lane] != key:  # behind the lane's last read, which another stream may still be at
                released = array.control.words[at + Reader.RELEASED]
                if array.control.words[at + Reader.DONE] < released:
                    array.behind(raw, array.control.region, [(at + Reader.DONE, released)], deadline)
            self._streams[lane] = key
            yield at
        finally:
            with self._free:
                self._busy.discard(lane)
                self._free.notify()

    def _choose(self, key: Hashable) -> int | None:
        words = self._array.control.words
        free = [lane for lane in range(Reader.LANES) if lane not in self._busy]
        if not free:
            return None

        def cost(lane: int) -> int:
            if self._streams[lane] == key:
                return 0
            at = self.at + lane
            return 1 if words[at + Reader.DONE] >= words[at + Reader.RELEASED] else 2

        return min(free, key=cost)

    def ring(self) -> None:
        self._array.control.ring_bell()

    def leave(self, deadline: Deadline) -> None:
        """Once this process's streams have done every read that ended."""
        if self._cell is None:
            return
        array = self._array
        for at in range(self.at, self.at + Reader.LANES):
            wait_word(
                array.control.region,
                at + Reader.DONE,
                array.control.words[at + Reader.RELEASED],
                deadline,
                check=lambda: None,
                what=lambda: f"this process's own reads of {array.name!r}",
                polled=array.backend.device_writes,
            )
        request = LeaveReader(array.incarnation, self._cell)
        array.session.request("leave_reader", request, Empty, deadline)

    def quiet(self) -> bool:
        """Whether no stream of this process still reads."""
        words = self._array.control.words
        lanes = range(self.at, self.at + Reader.LANES) if self._cell is not None else ()
        return all(words[at + Reader.DONE] >= words[at + Reader.RELEASED] for at in lanes)
