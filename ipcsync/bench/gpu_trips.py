"""Round trips and hops of two processes on one GPU: each by the public API, and by what one would do without it.

The contestants that use nothing but ipcsync run on the CPU's streams as well (``device="cpu"``), which is how the tests
see that they work.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import ipcsync
from ipcsync.shm import Region

from .contest import Contestant

BARE, WITH_KERNELS = 0, 1  # the cases
SPIN_US = 200  # the producer's kernel, long enough for the consumer to be waiting when it ends (20 was not, seen)
STAMPS = 4096  # kept of each kind

_KERNEL = r"""extern "C" __global__ void stamp(long long ns, unsigned long long* began, unsigned long long* ended) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  if (began) *(volatile unsigned long long*)began = begin;
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < (unsigned long long)ns);
  if (ended) *(volatile unsigned long long*)ended = now;
  __threadfence_system();
}"""


class Stamps:
    """Work that says when it began and ended, in nanoseconds, on a page that both processes and the device reach."""

    def __init__(self, path: Path, stream: ipcsync.Stream) -> None:
        self.stream, self.region = stream, Region.open(path)
        self._kernel: Any = None
        if stream.device.type == "cuda":
            import cupy

            with stream._backend.using(stream.device.index):
                stream._backend.register(self.region)
            self._kernel = cupy.RawKernel(_KERNEL, "stamp")
        self.put(0, began=0, ended=STAMPS)  # a first launch loads the module, which must not wait for a stream
        stream.synchronize()

    def put(self, microseconds: float, *, began: int | None = None, ended: int | None = None) -> None:
        """Work of that length on the stream; `began` and `ended`: the words for its times."""
        self.stream.enqueue(self._launch, microseconds, began, ended)

    def _launch(self, microseconds: float, began: int | None, ended: int | None) -> None:
        if self._kernel is None:
            start = now = time.monotonic_ns()
            while now - start < 1e3 * microseconds:
                now = time.monotonic_ns()
            for index, value in ((began, start), (ended, now)):
                if index is not None:
                    self.region.words[index] = value
            return
        import cupy

        address = [0 if index is None else self.region.address + 8 * index for index in (began, ended)]
        arguments = (cupy.int64(1e3 * microseconds), cupy.uint64(address[0]), cupy.uint64(address[1]))
        self._kernel((1,), (1,), arguments)


class GpuTrip(Contestant):
    """The parent signals, the child signals back. With kernels: the parent's kernel ends, the child's begins."""

    def __init__(self, device: str) -> None:
        self.device = device

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.path = folder / f"stamps-{type(self).__name__}"
        Region.create(self.path, 16 * STAMPS)

    def open(self, peer: int | None) -> None:
        self.stream = ipcsync.Stream(self.device)
        self.stamps = Stamps(self.path, self.stream)

    def turn(self, case: int, number: int) -> None:
        if case == WITH_KERNELS:
            self.stamps.put(SPIN_US, ended=STAMPS + number % STAMPS)
        self.there(number)

    def answer(self, peer: int, case: int, number: int) -> None:
        self.back(number, lambda: self._begin(case, number))

    def _begin(self, case: int, number: int) -> None:
        if case == WITH_KERNELS:
            self.stamps.put(0, began=number % STAMPS)

    def there(self, number: int) -> None:
        """Signals, and waits for the answer."""
        raise NotImplementedError

    def back(self, number: int, work: Callable[[], None]) -> None:
        """Waits for the signal, does `work` behind it, and answers."""
        raise NotImplementedError

    def settle(self) -> None:
        self.stream.synchronize()

    def measure(self, case: int, numbers: range) -> list[float]:
        """Microseconds: of a round trip, the mean of a chain; of hops, each."""
        start = time.perf_counter()
        for number in numbers:
            self.turn(case, number)
        self.settle()
        if case == BARE:
            return [1e6 * (time.perf_counter() - start) / len(numbers)]
        words = self.stamps.region.words
        return [(words[n % STAMPS] - words[STAMPS + n % STAMPS]) / 1e3 for n in numbers]


class SharedEvents(GpuTrip):
    name = "ipcsync shared events"
    via: Any = "auto"

    def open(self, peer: int | None) -> None:
        super().open(peer)
        self.session = ipcsync.connect()
        names = [f"{type(self).__name__}-{each}" for each in ("ping", "pong")]
        if peer is None:
            made = [self.session.create_event(name, device=self.device, via=self.via) for name in names]
        else:
            made = [self.session.open_event(name, timeout=60.0) for name in names]
        self.ping, self.pong = made
        self._count = [0, 0]  # rounds go on over both cases

    def there(self, number: int) -> None:
        n = self.ping.record(self.stream)
        self.pong.wait(self.stream, round=n)

    def back(self, number: int, work: Callable[[], None]) -> None:
        self._count[0] += 1
        self.ping.wait(self.stream, round=self._count[0])
        work()
        self.pong.record(self.stream)

    def close(self) -> None:
        self.session.close()


class RawEvents(GpuTrip):
    """Interprocess events, their handles exchanged once; the hosts tell each other of a record by words of a page."""

    name = "IPC events, host flags"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        super().prepare(context, folder)
        self.ends = context.Pipe()
        self.flags_path = folder / "flags"
        self.flags_path.write_bytes(bytes(4096))

    def open(self, peer: int | None) -> None:
        super().open(peer)
        with self.flags_path.open("r+b") as file:
            self.flags = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
        end = self.ends[0 if peer is None else 1]
        self.mine = ipcsync.Event(self.device, interprocess=True)
        self.mine.record(self.stream)
        end.send_bytes(self.mine.ipc_handle())
        self.theirs = ipcsync.Event.from_ipc_handle(self.device, end.recv_bytes())
        self.round = 0

    def _until(self, index: int) -> None:
        deadline = time.monotonic() + 30.0
        while self.flags[index] < self.round:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise TimeoutError("the other process did not record")

    def there(self, number: int) -> None:
        self.round += 1
        self.mine.record(self.stream)
        self.flags[0] = self.round
        self._until(64)
        self.theirs.wait(self.stream)

    def back(self, number: int, work: Callable[[], None]) -> None:
        self.round += 1
        self._until(0)
        self.theirs.wait(self.stream)
        work()
        self.mine.record(self.stream)
        self.flags[64] = self.round


class SyncAndMessage(GpuTrip):
    """The host waits for its stream, and sends a message."""

    name = "synchronize + ZeroMQ"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        super().prepare(context, folder)
        self.endpoint = f"ipc://{folder}/sync-trip"

    def open(self, peer: int | None) -> None:
        import zmq

        super().open(peer)
        self.context: Any = zmq.Context()
        self.socket: Any = self.context.socket(zmq.PAIR)
        self.socket.bind(self.endpoint) if peer is None else self.socket.connect(self.endpoint)

    def there(self, number: int) -> None:
        self.stream.synchronize()
        self.socket.send(b"x")
        self.socket.recv()

    def back(self, number: int, work: Callable[[], None]) -> None:
        self.socket.recv()
        work()
        self.stream.synchronize()
        self.socket.send(b"x")

    def close(self) -> None:
        self.socket.close()
        self.context.term()


GPU_TRIPS: list[type[GpuTrip]] = [SharedEvents, RawEvents, SyncAndMessage]
