"""What record and wait cost the interpreter, the driver's calls left out: ``python -m tests.benchmarks.python_side``.

The cuda backend runs on a driver that does nothing, on shared events of the host. Figures are microseconds of this
thread's CPU time, the best of several batches, so that they hold on a busy machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ipcsync
from ipcsync.backends.cuda import CudaBackend
from ipcsync.backends.cuda_pending import Pending
from ipcsync.backends.cuda_streams import KeptStream
from ipcsync.bench.contest import arena
from ipcsync.ledger import Cell
from ipcsync.stream import Stream


class NoDriver(CudaBackend):
    """Every call succeeds and does nothing."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        self._pending = Pending(lambda event: True)
        self._devices: Any = SimpleNamespace(count=1, current=lambda: 0)
        self._queues = {0: 32}
        self._driver: Any = SimpleNamespace(CUstream=lambda pointer: pointer, cuStreamQuery=lambda raw: (0,))
        self._write64 = self._wait64 = lambda *_: (0,)
        self._capturing = lambda _: (0, 0)


def best(call: Callable[[], object], batches: int, count: int = 1000) -> float:
    took = []
    for _ in range(batches):
        start = time.thread_time()
        for _ in range(count):
            call()
        took.append(1e6 * (time.thread_time() - start) / count)
    return min(took)


def measure(batches: int = 9) -> dict[str, float]:
    found = {}
    driver = NoDriver()
    with arena(), ipcsync.connect() as session:
        ours, late = (session.create_event(name, device="cpu") for name in ("ours", "late"))
        for event in (ours, late):
            timeline = event._timeline
            timeline.backend, timeline._polled, timeline._threaded, timeline._write = driver, True, False, driver.write
        streams = [Stream._of(ours.device, KeptStream(1 << (20 + i), object(), 0)) for i in range(2)]
        for stream in streams:
            stream._backend = driver
        words, at = session.ledger.words, late._timeline.at

        def pending() -> None:
            """A wait for the round after the last, which is complete: so it goes from hand-off to hand-off."""
            issued = words[at + Cell.ISSUED] + 1
            words[at + Cell.ISSUED], words[at + Cell.WORD] = issued, issued - 1
            late.wait(streams[1], round=issued)

        late.record(streams[0])
        found["SharedEvent.record, cuda"] = best(lambda: ours.record(streams[0]), batches)
        found["SharedEvent.wait, cuda, pending"] = best(pending, batches)
        words[at + Cell.WORD] = words[at + Cell.ISSUED]
        found["SharedEvent.wait, complete"] = best(lambda: late.wait(streams[1], round=1), batches)
        for event in (ours, late):
            words[event._timeline.at + Cell.WORD] = words[event._timeline.at + Cell.ISSUED]
        host = session.create_event("host", device="cpu")
        found["SharedEvent.record, host"] = best(host.record, batches)
        found["SharedEvent.synchronize, complete"] = best(lambda: host.synchronize(round=1), batches)
        ring = session.create_channel("ring", shape=(16,), dtype="uint8", depth=4, device="cpu")
        with ring.writer() as writer, ring.reader() as reader:

            def turns() -> None:
                with writer.slot():
                    pass
                with reader.get():
                    pass

            found["a slot written and read, host"] = best(turns, batches)
    return found


if __name__ == "__main__":
    for name, microseconds in measure().items():
        print(f"| {name} | {microseconds:.2f} |")
