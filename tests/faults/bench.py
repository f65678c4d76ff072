"""What the fault tests share: counts asked for by environment, figures, and work whose values can be checked.

A normal run is short. ``IPCSYNC_FAULT_KILLS=1000 pytest -s tests/faults/test_kills.py`` is the long one;
docs/reliability.md has all of these commands and what came of them. Times are printed, and held against the promised
limits only where ``IPCSYNC_FAULT_LIMITS=1`` says that the machine does nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import pytest

import ipcsync

from ..harness import Child

Start = Callable[[Any, tuple[Any, ...]], Child]  # starts a process that runs a function
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LIMITS = os.environ.get("IPCSYNC_FAULT_LIMITS") == "1"


def asked(name: str, normally: int) -> int:
    """A count from the environment: ``IPCSYNC_FAULT_<name>``."""
    return int(os.environ.get(f"IPCSYNC_FAULT_{name}", normally))


def say(text: str) -> None:
    """A line of result: seen with ``pytest -s``, and with every failure."""
    print(f"\n{text}", flush=True)


def figures(what: str, seconds: Sequence[float], limit: float) -> None:
    """Prints p50, p99 and max in milliseconds; holds p99 against `limit` (seconds) where that was asked for."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.99))
    say(f"{what}: n={len(ordered)} p50={p50 * 1e3:.1f} ms p99={p99 * 1e3:.1f} ms max={ordered[-1] * 1e3:.1f} ms")
    if LIMITS:
        assert p99 <= limit, f"{what}: p99 is {p99 * 1e3:.1f} ms, promised are {limit * 1e3:g}"


@contextmanager
def batch(start: Start, count: int, fn: Any, *args: Any) -> Iterator[list[Child]]:
    """That many new processes, which start together; each must say that it is ready. None outlives the block."""
    children: list[Child] = []
    try:
        for _ in range(count):
            children.append(start(fn, args))
        for child in children:
            assert child.recv(120) == "ready"
        yield children
    finally:
        for child in children:
            child.end()


class Bench:
    """A device and what is computed on it: uint64 arrays, written and read behind each other on streams."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":  # loading a kernel waits for streams that are held: before any is
            import cupy

            array, out = cupy.zeros(64, cupy.uint64), cupy.zeros(64, cupy.uint64)
            stream = self.stream()
            self.fill(stream, array, 1, 0)
            self.add(stream, array, out)
            self.values(stream, out)

    def stream(self) -> ipcsync.Stream:
        return ipcsync.Stream(self.device)

    def fill(self, stream: ipcsync.Stream, array: Any, value: int, milliseconds: float) -> None:
        """A kernel that takes that long; whoever dies in the middle of it leaves an array that holds something else."""
        if self.device == "cpu":
            stream.enqueue(_fill, array, value, milliseconds)
        else:
            from ..cuda import gpu

            with stream:
                gpu.fill(array, value, milliseconds * 1000)

    def add(self, stream: ipcsync.Stream, source: Any, target: Any) -> None:
        """target = source + 1."""
        if self.device == "cpu":
            stream.enqueue(numpy.add, source, 1, target)
        else:
            from ..cuda import gpu

            with stream:
                gpu.add_one(source, target)

    def empty(self, size: int) -> Any:
        if self.device == "cpu":
            return numpy.zeros(size, "uint64")
        import cupy

        return cupy.zeros(size, "uint64")

    def values(self, stream: ipcsync.Stream, array: Any) -> Any:
        """What the array holds when the stream is there, as a NumPy array."""
        stream.synchronize()
        if self.device == "cpu":
            return array.copy()
        with stream:
            return array.get()

    def works(self, stream: ipcsync.Stream) -> bool:
        """Whether the stream is of use."""
        out = self.empty(8)
        if self.device == "cuda":
            import cupy

            cupy.cuda.get_current_stream().synchronize()
        self.fill(stream, out, 7, 0)
        return bool((self.values(stream, out) == 7).all())


def _fill(array: Any, value: int, milliseconds: float) -> None:
    half = len(array) // 2
    array[:half] = value
    if milliseconds:
        time.sleep(milliseconds / 1000)
    array[half:] = value
