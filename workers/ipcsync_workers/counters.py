"""What a worker counts, in a page of memory that the supervisor holds: it is exact however the worker ends.

Words are 64 bits and have one writer, the worker. A hop's latency goes into buckets of a sixteenth of a power of two
(at most 6 % off), so that a page stays small however long the run is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable

_DROPPED, _NOW, _COUNTS, _TURN, _RECORDS, _BUCKETS = 0, 1, 2, 8, 9, 19
_ITEMS, _BYTES, _LAST = range(3)  # words of each of the two COUNTS; NOW says which one holds
_MADE, _PART, _EPOCH, _NUMBER, _NBYTES = range(5)  # words of each of the two RECORDS
_PER_OCTAVE, _OCTAVES = 16, 40  # from 1 ns to 18 minutes
_PORT_WORDS = _BUCKETS + _PER_OCTAVE * _OCTAVES
_HEAD_WORDS = 8
_EXPECTED = 0
NOTHING = 0xFFFF  # as `part`: there is nothing of the item


class Port:
    """The counts of one input or output of a stage: ``items``, ``bytes``, and the number of the ``last`` finished."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def count(self, number: int, nbytes: int) -> None:
        """One more item, which was `number`."""
        self._set(self.items + 1, self.bytes + nbytes, number)

    def passed(self, number: int) -> None:
        """`number` is over, and is no item that counts."""
        if number != self.last:
            self._set(self.items, self.bytes, number)

    def _set(self, *counts: int) -> None:
        """All of them by one store: wherever a kill strikes, they agree."""
        words, other = self._words, self._words[_NOW] ^ 1
        at = _COUNTS + 3 * other
        words[at], words[at + 1], words[at + 2] = counts
        words[_NOW] = other

    def _get(self, which: int) -> int:
        words = self._words
        return words[_COUNTS + 3 * words[_NOW] + which]

    def drop(self) -> None:
        """One that came before was left out."""
        self._words[_DROPPED] += 1

    def begin(self, made: int, part: int, epoch: int, number: int, nbytes: int) -> None:
        """What is about to be published: item `number` of writer `epoch`, part `part` of what is made of `made`. It
        overwrites what was said two calls ago, so that one that began and never came true leaves the one before."""
        words, turn = self._words, self._words[_TURN] ^ 1
        at = _RECORDS + 5 * turn
        words[at + _NUMBER] = 0
        words[at + _MADE], words[at + _PART], words[at + _EPOCH], words[at + _NBYTES] = made, part, epoch, nbytes
        words[at + _NUMBER] = number
        words[_TURN] = turn

    def settle(self, stands: Callable[[int, int], bool]) -> tuple[int, int] | None:
        """After a death: counts what was published and not counted. (made, part) of the last that was published;
        `stands` tells of (epoch, number) whether it was."""
        words = self._words
        last: tuple[int, int, int, int, int] | None = None
        for turn in (0, 1):
            made, part, epoch, number, nbytes = words[_RECORDS + 5 * turn : _RECORDS + 5 * turn + 5]
            if number and stands(epoch, number) and (last is None or number > last[3]):
                last = made, part, epoch, number, nbytes
                words[_TURN] = turn
        if last is None:
            return None
        if last[3] > self.last and last[1] != NOTHING:
            self.count(last[3], last[4])
        return last[:2]

    def hop(self, nanoseconds: int) -> None:
        """From the writer's publication of an item to this reader's taking it."""
        self._words[_BUCKETS + _bucket(max(1, nanoseconds))] += 1

    @property
    def items(self) -> int:
        return self._get(_ITEMS)

    @property
    def bytes(self) -> int:
        return self._get(_BYTES)

    @property
    def last(self) -> int:
        return self._get(_LAST)

    @property
    def dropped(self) -> int:
        return self._words[_DROPPED]

    @property
    def buckets(self) -> list[int]:
        return list(self._words[_BUCKETS:])


def _bucket(nanoseconds: int) -> int:
    octave = nanoseconds.bit_length() - 1
    within = (nanoseconds * _PER_OCTAVE >> octave) - _PER_OCTAVE
    return min(octave, _OCTAVES - 1) * _PER_OCTAVE + within


def percentile(buckets: Iterable[list[int]], share: float) -> float | None:
    """The latency, in seconds, that `share` of the hops of all `buckets` did not exceed; None when there was no hop."""
    total = [sum(each) for each in zip(*buckets, strict=True)]
    left = share * sum(total)
    for index, count in enumerate(total):
        left -= count
        if count and left <= 0:
            octave, within = divmod(index, _PER_OCTAVE)
            return (2.0**octave) * (1 + (within + 0.5) / _PER_OCTAVE) / 1e9
    return None


class Counters:
    """The page of one worker: a port for each of its inputs and outputs, in the order of the file."""

    def __init__(self, fd: int, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        names = [("in", name) for name in inputs] + [("out", name) for name in outputs]
        size = 8 * (_HEAD_WORDS + _PORT_WORDS * len(names))
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self.fd = fd
        self._map = mmap.mmap(fd, size)
        self._words = memoryview(self._map).cast("Q")
        ports = [self._words[at : at + _PORT_WORDS] for at in range(_HEAD_WORDS, size // 8, _PORT_WORDS)]
        self._views = ports
        pairs = list(zip(names, map(Port, ports), strict=True))
        self.inputs = {name: port for (side, name), port in pairs if side == "in"}
        self.outputs = {name: port for (side, name), port in pairs if side == "out"}

    @classmethod
    def create(cls, inputs: Iterable[str], outputs: Iterable[str]) -> Counters:
        """A page of zeros without a name: it goes with the last process that holds it."""
        return cls(os.memfd_create("ipcsync-counters", os.MFD_CLOEXEC), inputs, outputs)

    @property
    def expected(self) -> int:
        """How many items the stage said it will make; 0 when it did not say."""
        return self._words[_EXPECTED]

    @expected.setter
    def expected(self, items: int) -> None:
        self._words[_EXPECTED] = items

    def close(self) -> None:
        for view in self._views:
            view.release()
        self._words.release()
        self._map.close()
        os.close(self.fd)
