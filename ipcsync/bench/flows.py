"""Items from one process to one, two or four others on the CPU: a channel, and what a user would pick instead.

Every producer does the same work an item (it fills the frame), every consumer the same (it reads two corners of it);
only how the frame gets across differs. Each reader sees every item. ``Fill`` is the producer's work alone: no way
across can be faster.
"""

from __future__ import annotations

import pickle
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

import ipcsync

from .contest import Contestant

DEPTH = 4  # buffers of the ring, of the pool, and items that a queue may hold
READERS = (1, 2, 4)
Shape = tuple[int, ...]


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

    def shape(self, case: int) -> Shape:
        return self.shapes[case // len(self.readers)]

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
                    f"bench-{case}", shape=self.shape(case), dtype="uint8", depth=DEPTH, device="cpu"
                ).writer()
                for case in range(self.cases)
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
        frame = self.frames[case // len(self.readers)]
        fill(frame, number)
        look(frame, number)


class Queues(Flow):
    """One queue a reader."""

    name = "mp.Queue of arrays"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.queues = [context.Queue(DEPTH) for _ in range(self.peers)]

    def turn(self, case: int, number: int) -> None:
        frame = np.empty(self.shape(case), np.uint8)  # a new one: the queue's thread pickles it later
        fill(frame, number)
        for queue in self.queues[: self.count(case)]:
            queue.put(frame)

    def answer(self, peer: int, case: int, number: int) -> None:
        look(self.queues[peer].get(), number)


class Pipes(Flow):
    """pickle's protocol 5, the frame's bytes out of band: one copy into a pipe and one out of it."""

    name = "pickle protocol 5, pipe"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.ends = [context.Pipe(duplex=False) for _ in range(self.peers)]

    def open(self, peer: int | None) -> None:
        if peer is None:
            self.frames = [np.empty(shape, np.uint8) for shape in self.shapes]

    def turn(self, case: int, number: int) -> None:
        frame = self.frames[case // len(self.readers)]
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
        nbytes = max(int(np.prod(shape)) for shape in self.shapes)
        self.blocks = [SharedMemory(create=True, size=nbytes) for _ in range(DEPTH)]
        self.full = [context.Queue() for _ in range(self.peers)]
        self.free = [context.Queue() for _ in range(self.peers)]
        for queue in self.free:
            for index in range(DEPTH):
                queue.put(index)

    def open(self, peer: int | None) -> None:
        self.peer = peer
        self.frames = [[np.ndarray(shape, np.uint8, block.buf) for block in self.blocks] for shape in self.shapes]

    def turn(self, case: int, number: int) -> None:
        readers = self.count(case)
        for queue in self.free[:readers]:
            index = queue.get()  # the same from all: they free them in the same order
        fill(self.frames[case // len(self.readers)][index], number)
        for queue in self.full[:readers]:
            queue.put(index)

    def answer(self, peer: int, case: int, number: int) -> None:
        index = self.full[peer].get()
        look(self.frames[case // len(self.readers)][index], number)
        self.free[peer].put(index)

    def close(self) -> None:
        self.frames.clear()
        for block in self.blocks:
            block.close()
            if self.peer is None:
                block.unlink()


FLOWS: list[type[Flow]] = [Channel, Fill, Queues, Pipes, SharedMemoryAndQueues]
