"""Frames from one process to another: a channel, and what a user would pick instead.

Every producer does the same work an item (it fills a frame), every consumer the same (it reads a corner of it); only
how the frame gets across differs. ``Fill`` is that work alone: no way across can be faster.
"""

from __future__ import annotations

from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import ipcsync

DEPTH = 4  # buffers of the ring, of the pool, and items that a queue may hold


def fill(frame: Any, number: int) -> None:
    frame[...] = number & 0xFF


def look(frame: Any, number: int) -> None:
    if int(frame.flat[0]) != number & 0xFF or int(frame.flat[-1]) != number & 0xFF:
        raise AssertionError(f"item {number} holds {frame.flat[0]} and {frame.flat[-1]}")


class Flow:
    """``prepare`` runs in the parent before the child exists, ``open`` in each process. The child produces."""

    name: ClassVar[str]

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def prepare(self, context: SpawnContext, folder: Path) -> None: ...

    def open(self, *, child: bool) -> None: ...

    def produce(self, number: int) -> None:
        raise NotImplementedError

    def consume(self, number: int) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class Channel(Flow):
    name = "ipcsync channel"

    def open(self, *, child: bool) -> None:
        self.session = ipcsync.connect()
        if child:
            self.writer = self.session.open_channel("bench-frames").writer()
        else:
            channel = self.session.create_channel(
                "bench-frames", shape=self.shape, dtype="uint8", depth=DEPTH, device="cpu"
            )
            self.reader = channel.reader()

    def produce(self, number: int) -> None:
        with self.writer.slot() as slot:
            fill(slot.array, number)

    def consume(self, number: int) -> None:
        with self.reader.get() as slot:
            look(slot.array, number)

    def close(self) -> None:
        self.session.close()


class Fill(Flow):
    """The producer's work alone, in one process."""

    name = "filling alone (ceiling)"

    def open(self, *, child: bool) -> None:
        self.frame = np.empty(self.shape, np.uint8)

    def produce(self, number: int) -> None: ...

    def consume(self, number: int) -> None:
        fill(self.frame, number)
        look(self.frame, number)


class QueueOfArrays(Flow):
    name = "mp.Queue of arrays"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.queue = context.Queue(DEPTH)

    def produce(self, number: int) -> None:
        frame = np.empty(self.shape, np.uint8)  # a new one: the queue's thread pickles it later
        fill(frame, number)
        self.queue.put(frame)

    def consume(self, number: int) -> None:
        look(self.queue.get(), number)


class SharedMemoryAndQueue(Flow):
    """A pool of blocks; their numbers go round through two queues. What a careful user builds by hand."""

    name = "shared_memory and mp.Queue"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.nbytes = int(np.prod(self.shape))
        self.blocks = [SharedMemory(create=True, size=self.nbytes) for _ in range(DEPTH)]
        self.free, self.full = context.Queue(), context.Queue()
        for index in range(DEPTH):
            self.free.put(index)

    def open(self, *, child: bool) -> None:
        self.child = child
        self.frames = [np.ndarray(self.shape, np.uint8, block.buf) for block in self.blocks]

    def produce(self, number: int) -> None:
        index = self.free.get()
        fill(self.frames[index], number)
        self.full.put(index)

    def consume(self, number: int) -> None:
        index = self.full.get()
        look(self.frames[index], number)
        self.free.put(index)

    def close(self) -> None:
        self.frames.clear()
        for block in self.blocks:
            block.close()
            if not self.child:
                block.unlink()


FLOWS: list[type[Flow]] = [Channel, Fill, QueueOfArrays, SharedMemoryAndQueue]
