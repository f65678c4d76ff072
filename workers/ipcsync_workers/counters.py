"""What a worker counts, in a page of memory that the supervisor holds: it is exact however the worker ends.

Words are 64 bits and have one writer, the worker. A hop's latency goes into buckets of a sixteenth of a power of two
(at most 6 % off), so that a page stays small however long the run is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

_ITEMS, _BYTES, _LAST, _BUCKETS = range(4)
_PER_OCTAVE, _OCTAVES = 16, 40  # from 1 ns to 18 minutes
_PORT_WORDS = _BUCKETS + _PER_OCTAVE * _OCTAVES
_HEAD_WORDS = 8
_EXPECTED = 0


class Port:
    """The counts of one input or output of a stage: ``items``, ``bytes``, and the number of the ``last`` finished."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def count(self, number: int, nbytes: int) -> None:
        """One more item, which was `number`."""
        words = self._words
        words[_ITEMS] += 1
        words[_BYTES] += nbytes
        words[_LAST] = number

    def hop(self, nanoseconds: int) -> None:
        """From the writer's publication of an item to this reader's taking it."""
        self._words[_BUCKETS + _bucket(max(1, nanoseconds))] += 1

    @property
    def items(self) -> int:
        return self._words[_ITEMS]

    @property
    def bytes(self) -> int:
        return self._words[_BYTES]

    @property
    def last(self) -> int:
        return self._words[_LAST]

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
