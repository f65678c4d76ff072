"""Hand-offs of an array on one GPU from process to process, and a pipeline of three stages.

A hand-off: the producer fills an array, the consumer reads a bit of it and acknowledges that it may be filled again.
The case says how many are under way at a time, each in an array of its own: with 1 the next comes only after the
acknowledgement.
"""

from __future__ import annotations

import time
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import ipcsync

from .contest import Contestant

SHAPE = (1080, 1920, 3)
LOOK = 64  # bytes that the consumer reads
CASES = 1, 2, 8  # under way at a time


class HandOff(Contestant):
    def __init__(self, device: str) -> None:
        self.device = device

    def open(self, peer: int | None) -> None:
        self.stream = ipcsync.Stream(self.device)
        self.xp: Any = numeric(self.device)
        with self.stream:
            self.seen = self.xp.zeros(LOOK, "uint8")
            warm = self.xp.zeros(SHAPE, "uint8")  # loads the kernels, which must not wait for a stream
            self.fill(warm, 1)
            self.look(warm)
            self.middle(warm, warm)
        self.stream.synchronize()

    def fill(self, array: Any, number: int) -> None:
        array[...] = number & 0xFF

    def look(self, array: Any) -> None:
        self.seen[...] = array.reshape(-1)[:LOOK]

    def middle(self, array: Any, out: Any) -> None:
        self.xp.subtract(255, array, out=out)

    def settle(self) -> None:
        self.stream.synchronize()

    def acknowledged(self, case: int, number: int) -> None:
        """Until item `number` was acknowledged: by the host or by the stream, as the contestant does it."""

    def measure(self, case: int, numbers: range) -> list[float]:
        """Microseconds of one hand-off, the mean of a chain."""
        start = time.perf_counter()
        for number in numbers:
            self.turn(case, number)
            if number - case >= numbers[0] - 1:
                self.acknowledged(case, number - case + 1)
        for number in range(max(numbers[0], numbers[-1] - case + 2), numbers[-1] + 1):
            self.acknowledged(case, number)
        self.settle()
        return [1e6 * (time.perf_counter() - start) / len(numbers)]


def numeric(device: str) -> Any:
    """numpy, or CuPy."""
    if device == "cpu":
        import numpy

        return numpy
    import cupy

    return cupy


class ByChannel(HandOff):
    """One at a time the acknowledgement is a shared event, which the producer's stream waits for. With more, a ring of
    as many buffers is acknowledgement enough."""

    name = "ipcsync channel"

    def open(self, peer: int | None) -> None:
        super().open(peer)
        self.session = session = ipcsync.connect()
        if peer is None:
            self.writers = {
                case: session.create_channel(
                    f"handoff-{case}", shape=SHAPE, dtype="uint8", depth=max(2, case), device=self.device
                ).writer()
                for case in CASES
            }
            self.ack = session.create_event("handoff-ack", device=self.device)
        else:
            self.readers = {case: session.open_channel(f"handoff-{case}", timeout=60.0).reader() for case in CASES}
            self.ack = session.open_event("handoff-ack", timeout=60.0)

    def turn(self, case: int, number: int) -> None:
        with self.writers[case].slot(self.stream) as slot:
            self.stream.enqueue(self.fill, slot.array, number)

    def acknowledged(self, case: int, number: int) -> None:
        if case == 1:
            self.ack.wait(self.stream, round=number)

    def answer(self, peer: int, case: int, number: int) -> None:
        with self.readers[case].get(self.stream) as slot:
            self.stream.enqueue(self.look, slot.array)
        if case == 1:
            self.ack.record(self.stream)

    def close(self) -> None:
        self.session.close()


class ByTorchQueue(HandOff):
    """torch.multiprocessing: a new tensor for each item."""

    name = "torch.multiprocessing queue, new tensors"
    same = False

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        import torch.multiprocessing as torch_processes

        torch_context = torch_processes.get_context("spawn")
        self.there, self.back = torch_context.Queue(), torch_context.Queue()

    def open(self, peer: int | None) -> None:
        import torch
        import torch.multiprocessing  # teaches pickle about tensors

        self.torch: Any = torch
        self.seen = torch.zeros(LOOK, dtype=torch.uint8, device="cuda")
        self.arrays = [torch.empty(SHAPE, dtype=torch.uint8, device="cuda") for _ in range(max(CASES))]
        self.arrays[0].fill_(1)
        self.seen.copy_(self.arrays[0].view(-1)[:LOOK])
        torch.cuda.synchronize()

    def turn(self, case: int, number: int) -> None:
        torch = self.torch
        tensor = self.arrays[number % case] if self.same else torch.empty(SHAPE, dtype=torch.uint8, device="cuda")
        tensor.fill_(number & 0xFF)
        self.there.put(tensor)

    def acknowledged(self, case: int, number: int) -> None:
        self.back.get(timeout=30)

    def answer(self, peer: int, case: int, number: int) -> None:
        tensor = self.there.get()
        self.seen.copy_(tensor.view(-1)[:LOOK])
        self.torch.cuda.current_stream().synchronize()  # before the sender may write it again
        del tensor
        self.back.put(number)

    def settle(self) -> None:
        self.torch.cuda.synchronize()


class BySameTensor(ByTorchQueue):
    name = "torch.multiprocessing queue, the same tensors"
    same = True


class _Shared(HandOff):
    """Arrays of the parent's, opened once by the child; a ZeroMQ pair between them."""

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.ends = context.Pipe()
        self.endpoint = f"ipc://{folder}/{type(self).__name__}"

    def open(self, peer: int | None) -> None:
        import cupy
        import zmq

        super().open(peer)
        runtime, nbytes = cupy.cuda.runtime, SHAPE[0] * SHAPE[1] * SHAPE[2]
        if peer is None:
            self.memory = cupy.cuda.memory.Memory(max(CASES) * nbytes)
            self.ends[0].send_bytes(bytes(runtime.ipcGetMemHandle(self.memory.ptr)))
            pointer = cupy.cuda.MemoryPointer(self.memory, 0)
        else:
            opened = runtime.ipcOpenMemHandle(self.ends[1].recv_bytes())
            pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(opened, max(CASES) * nbytes, self), 0)
        self.arrays = [cupy.ndarray(SHAPE, cupy.uint8, pointer + i * nbytes) for i in range(max(CASES))]
        self.context: Any = zmq.Context()
        self.socket: Any = self.context.socket(zmq.PAIR)
        self.socket.bind(self.endpoint) if peer is None else self.socket.connect(self.endpoint)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class BySyncAndMessage(_Shared):
    name = "synchronize + ZeroMQ"

    def turn(self, case: int, number: int) -> None:
        self.stream.enqueue(self.fill, self.arrays[number % case], number)
        self.stream.synchronize()
        self.socket.send(b"x")

    def acknowledged(self, case: int, number: int) -> None:
        self.socket.recv()

    def answer(self, peer: int, case: int, number: int) -> None:
        self.socket.recv()
        self.stream.enqueue(self.look, self.arrays[number % case])
        self.stream.synchronize()
        self.socket.send(b"x")


KEPT = 4 * max(CASES)


class ByHandles(_Shared):
    """A new interprocess event for each item, its handle sent over ZeroMQ, as LMCache does it."""

    name = "event handles over ZeroMQ"

    def open(self, peer: int | None) -> None:
        super().open(peer)
        self.kept: list[Any] = []

    def _signal(self) -> None:
        event = ipcsync.Event(self.device, interprocess=True)
        event.record(self.stream)
        self.kept = [*self.kept[-KEPT:], event]  # until the other process has surely opened and passed it
        self.socket.send(event.ipc_handle())

    def _wait(self) -> None:
        event = ipcsync.Event.from_ipc_handle(self.device, self.socket.recv())
        event.wait(self.stream)
        self.kept = [*self.kept[-KEPT:], event]

    def turn(self, case: int, number: int) -> None:
        self.stream.enqueue(self.fill, self.arrays[number % case], number)
        self._signal()

    def acknowledged(self, case: int, number: int) -> None:
        self._wait()

    def answer(self, peer: int, case: int, number: int) -> None:
        self._wait()
        self.stream.enqueue(self.look, self.arrays[number % case])
        self._signal()


HAND_OFFS: list[type[HandOff]] = [ByChannel, ByTorchQueue, BySameTensor, BySyncAndMessage, ByHandles]


class ThreeStages(HandOff):
    """Source, middle and sink, each a process; the source in the parent. Case 0: nothing else on the GPU."""

    name = "three processes, ipcsync channels of 4"
    depth = 4
    peers = 2

    def open(self, peer: int | None) -> None:
        super().open(peer)
        self.session = ipcsync.connect()
        if peer is None:
            channels = [
                self.session.create_channel(
                    f"stages-{self.depth}-{i}", shape=SHAPE, dtype="uint8", depth=self.depth, device=self.device
                )
                for i in range(2)
            ]
            self.writer = channels[0].writer()
            return
        self.reader = self.session.open_channel(f"stages-{self.depth}-{peer}", timeout=60.0).reader()
        if peer == 0:
            self.writer = self.session.open_channel(f"stages-{self.depth}-1", timeout=60.0).writer()

    def turn(self, case: int, number: int) -> None:
        with self.writer.slot(self.stream) as slot:
            self.stream.enqueue(self.fill, slot.array, number)

    def answer(self, peer: int, case: int, number: int) -> None:
        with self.reader.get(self.stream) as slot:
            if peer == 0:
                with self.writer.slot(self.stream) as out:
                    self.stream.enqueue(self.middle, slot.array, out.array)
            else:
                self.stream.enqueue(self.look, slot.array)

    def close(self) -> None:
        self.session.close()


class DeepStages(ThreeStages):
    """Where processes take turns at the GPU, the buffers say how many items a turn can do."""

    name = "three processes, ipcsync channels of 16"
    depth = 16


class ThreeStreams(HandOff):
    """The same work in one process: three streams, two rings of four buffers, local events. The upper bound."""

    name = "one process, three streams"
    peers = 0

    def open(self, peer: int | None) -> None:
        super().open(peer)
        self.streams = [self.stream, ipcsync.Stream(self.device), ipcsync.Stream(self.device)]
        with self.stream:
            self.rings = [[self.xp.zeros(SHAPE, "uint8") for _ in range(4)] for _ in range(2)]
        self.stream.synchronize()
        self.full = [[ipcsync.Event(self.device) for _ in range(4)] for _ in range(2)]
        self.free = [[ipcsync.Event(self.device) for _ in range(4)] for _ in range(2)]

    def turn(self, case: int, number: int) -> None:
        b = number % 4
        source, middle, sink = self.streams
        self.free[0][b].wait(source)
        source.enqueue(self.fill, self.rings[0][b], number)
        self.full[0][b].record(source)
        self.full[0][b].wait(middle)
        self.free[1][b].wait(middle)
        middle.enqueue(self.middle, self.rings[0][b], self.rings[1][b])
        self.free[0][b].record(middle)
        self.full[1][b].record(middle)
        self.full[1][b].wait(sink)
        sink.enqueue(self.look, self.rings[1][b])
        self.free[1][b].record(sink)

    def settle(self) -> None:
        for stream in self.streams:
            stream.synchronize()


PIPELINES: list[type[HandOff]] = [ThreeStages, DeepStages, ThreeStreams]
