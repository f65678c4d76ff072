"""Items from one process to one, two or four others on the CPU: a channel, and what a user would pick instead.

Every producer does the same work an item (it fills the frame), every consumer the same (it reads two corners of it),
and what lies between holds as many items; only how the frame gets across differs. Each reader sees every item. ``Fill``
is the producer's work alone: no way across can be faster.
"""

from __future__ import annotations

import itertools
import pickle
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

import ipcsync

from .contest import Contestant

PIPE = 65536  # bytes that the kernel holds of a pipe that is not read
READERS = (1, 2, 4)
Shape = tuple[int, ...]


def depth(shape: Shape) -> int:
    """Buffers of the ring and of the pool, and items that a queue may hold: as many as a pipe takes, and at least 4."""
    return max(4, PIPE // int(np.prod(shape)))


def fill(frame: Any, number: int) -> None:
    frame[...] = number & 0xFF


def look(frame: Any, number: int) -> None:
    if int(frame.flat[0]) != number & 0xFF or int(frame.flat[-1]) != number & 0xFF:
        raise AssertionError(f"item {number} holds {frame.flat[0]} and {frame.flat[-1]}")


class Flow(Contestant):
    """A case is a shape and a number of readers: ``shapes[case // len(readers)]``, ``readers[case % len(readers)]``."""

    def __init__(self, shapes: list[Shape], readers: tuple[int, ...]) -> None:
        self.shapes, self.readers = shapes, readers
        self.peers = max(readers)
        self.cases = len(shapes) * len(readers)

    def size(self, case: int) -> int:
        """Which of the shapes."""
        return case // len(self.readers)

    def shape(self, case: int) -> Shape:
        return self.shapes[self.size(case)]

    def count(self, case: int) -> int:
        """How many readers the case has."""
        return self.readers[case % len(self.readers)]

    def takes_part(self, peer: int, case: int) -> bool:
        return peer < self.count(case)


class Channel(Flow):
    name = "ipcsync channel"

    def open(self, peer: int | None) -> None:
        self.session = ipcsync.connect()
        if peer is None:
            self.writers = [
                self.session.create_channel(
                    f"bench-{case}", shape=shape, dtype="uint8", depth=depth(shape), device="cpu"
                ).writer()
                for case, shape in enumerate(map(self.shape, range(self.cases)))
            ]
        else:
            self.opened = {
                case: self.session.open_channel(f"bench-{case}", timeout=60.0).reader()
                for case in range(self.cases)
                if self.takes_part(peer, case)
            }

    def turn(self, case: int, number: int) -> None:
        with self.writers[case].slot() as slot:
            fill(slot.array, number)

    def answer(self, peer: int, case: int, number: int) -> None:
        with self.opened[case].get() as slot:
            look(slot.array, number)

    def close(self) -> None:
        self.session.close()


class Fill(Flow):
    """The producer's work alone, in one process."""

    name = "filling alone (ceiling)"

    def __init__(self, shapes: list[Shape], readers: tuple[int, ...]) -> None:
        super().__init__(shapes, readers)
        self.peers = 0

    def open(self, peer: int | None) -> None:
        self.frames = [np.empty(shape, np.uint8) for shape in self.shapes]

    def turn(self, case: int, number: int) -> None:
        frame = self.frames[self.size(case)]
        fill(frame, number)
        look(frame, number)


class Queues(Flow):
    """One queue a reader."""

    name = "mp.Queue of arrays"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.queues = [[context.Queue(depth(shape)) for _ in range(self.peers)] for shape in self.shapes]

    def turn(self, case: int, number: int) -> None:
        frame = np.empty(self.shape(case), np.uint8)  # a new one: the queue's thread pickles it later
        fill(frame, number)
        for queue in self.queues[self.size(case)][: self.count(case)]:
            queue.put(frame)

    def answer(self, peer: int, case: int, number: int) -> None:
        look(self.queues[self.size(case)][peer].get(), number)


class Pipes(Flow):
    """pickle's protocol 5, the frame's bytes out of band: one copy into a pipe and one out of it."""

    name = "pickle protocol 5, pipe"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.ends = [context.Pipe(duplex=False) for _ in range(self.peers)]

    def open(self, peer: int | None) -> None:
        if peer is None:
            self.frames = [np.empty(shape, np.uint8) for shape in self.shapes]

    def turn(self, case: int, number: int) -> None:
        frame = self.frames[self.size(case)]
        fill(frame, number)
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(frame, protocol=5, buffer_callback=buffers.append)
        for _, end in self.ends[: self.count(case)]:
            end.send_bytes(head)
            end.send_bytes(buffers[0].raw())

    def answer(self, peer: int, case: int, number: int) -> None:
        end = self.ends[peer][0]
        head = end.recv_bytes()
        look(pickle.loads(head, buffers=[end.recv_bytes()]), number)


class SharedMemoryAndQueues(Flow):
    """A pool of blocks; their numbers go round through queues. What a careful user builds by hand."""

    name = "shared_memory and mp.Queue"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.blocks = [
            [SharedMemory(create=True, size=int(np.prod(shape))) for _ in range(depth(shape))] for shape in self.shapes
        ]
        self.full = [[context.Queue() for _ in range(self.peers)] for _ in self.shapes]
        self.free = [[context.Queue() for _ in range(self.peers)] for _ in self.shapes]
        for shape, queues in zip(self.shapes, self.free, strict=True):
            for queue in queues:
                for index in range(depth(shape)):
                    queue.put(index)

    def open(self, peer: int | None) -> None:
        self.peer = peer
        self.frames = [
            [np.ndarray(shape, np.uint8, block.buf) for block in blocks]
            for shape, blocks in zip(self.shapes, self.blocks, strict=True)
        ]

    def turn(self, case: int, number: int) -> None:
        size, readers = self.size(case), self.count(case)
        for queue in self.free[size][:readers]:
            index = queue.get()  # the same from all: they free them in the same order
        fill(self.frames[size][index], number)
        for queue in self.full[size][:readers]:
            queue.put(index)

    def answer(self, peer: int, case: int, number: int) -> None:
        size = self.size(case)
        index = self.full[size][peer].get()
        look(self.frames[size][index], number)
        self.free[size][peer].put(index)

    def close(self) -> None:
        self.frames.clear()
        for block in itertools.chain.from_iterable(self.blocks):
            block.close()
            if self.peer is None:
                block.unlink()


FLOWS: list[type[Flow]] = [Channel, Fill, Queues, Pipes, SharedMemoryAndQueues]
