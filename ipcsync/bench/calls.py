"""What one call costs the host: each timed in a loop of its own, the loops interleaved, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ipcsync
from ipcsync.shm import Region

from .contest import Missing, Table, arena, summary

Call = Callable[[], object]
BATCH = 200  # calls between two looks at the clock; streams are emptied between batches


def timed(calls: dict[str, Call], repeats: int, between: Call) -> dict[str, dict[str, float]]:
    """name -> microseconds a call; each repeat is the mean over one batch. `between` runs after each batch."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(BATCH):
                call()
            spent = 1e6 * (time.perf_counter() - start) / BATCH
            between()
            if repeat:
                took[name].append(spent)
    return {name: summary([times]) for name, times in took.items()}


@contextmanager
def held(backend: Any, device: int, session: ipcsync.Session) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A stream that waits for a word of ours; the second value lets it go, and holds it anew."""
    stream = ipcsync.Stream(f"cuda:{device}" if backend.device_type == "cuda" else "cpu")
    region = Region.create(session.runtime / "bench-gate", 4096)
    round = 1
    with backend.using(device):
        backend.register(region)
    backend.wait(stream._raw, region, 0, round)

    def release() -> None:
        nonlocal round
        region.words[0] = round
        stream.synchronize()
        round += 1
        backend.wait(stream._raw, region, 0, round)

    try:
        yield stream, release
    finally:
        region.words[0] = round
        stream.synchronize()
        backend.unregister(region)
        region.path.unlink()


def calls(device: str, *, quick: bool, missing: list[Missing]) -> list[Table]:
    """The host's cost of record, wait, and a slot's turn, on streams of `device`; the bare calls beside them."""
    with arena(), ipcsync.connect() as session:
        event = session.create_event("bench-event", device=device)
        late = session.create_event("bench-late", device=device)
        ring = session.create_channel("bench-ring", shape=(256,), dtype="uint8", depth=8, device=device)
        stream = ipcsync.Stream(device)
        backend = stream._backend
        with held(backend, event.device.index, session) as (blocked, release):
            event.record(stream)
            stream.synchronize()
            todo: dict[str, Call] = {
                "SharedEvent.record": lambda: event.record(stream),
                "SharedEvent.wait, complete": lambda: event.wait(stream, round=1),
                "SharedEvent.wait, pending": lambda: late.wait(stream),
                "SharedEvent.query": lambda: event.query(round=1),
                "SharedEvent.synchronize, complete": lambda: event.synchronize(round=1),
            }
            todo |= bare(device, stream, missing)
            if backend.device_writes:
                todo |= several_waits(stream, session.ledger.address(event._timeline._word))

            def between() -> None:
                release()
                stream.synchronize()
                late.record(blocked)  # behind what holds the stream

            late.record(blocked)
            rows = timed(todo, 3 if quick else 25, between)
        with ring.writer() as writer, ring.reader() as reader:
            turns = {
                "write a slot: enter, exit": lambda: _write(writer, stream),
                "read a slot: get, release": lambda: _read(reader, stream),
            }
            rows |= _alternating(turns, 20 if quick else 400, stream)
    table = Table("calls-" + device.partition(":")[0], f"host cost of one call, {device}", "µs")
    table.rows, table.note = (
        rows,
        f"streams of {device}, one thread, nobody else; each figure the mean of {BATCH} calls",
    )
    return [table]


def _write(writer: Any, stream: Any) -> None:
    with writer.slot(stream):
        pass


def _read(reader: Any, stream: Any) -> None:
    with reader.get(stream):
        pass


def _alternating(turns: Mapping[str, Call], repeats: int, stream: Any) -> dict[str, dict[str, float]]:
    """A write has to come before a read: one of each in turn, each timed alone."""
    took: dict[str, list[float]] = {name: [] for name in turns}
    for repeat in range(repeats + 10):
        for name, turn in turns.items():
            start = time.perf_counter()
            turn()
            if repeat >= 10:
                took[name].append(1e6 * (time.perf_counter() - start))
        if repeat % 4 == 3:
            stream.synchronize()
    return {name: summary([times]) for name, times in took.items()}


def bare(device: str, stream: Any, missing: list[Missing]) -> dict[str, Call]:
    """The same without us: what the driver's own calls take from Python, or a futex wake."""
    if device == "cpu":
        import ctypes

        from ipcsync import linux

        word = ctypes.c_uint64(0)
        return {"bare futex wake, ctypes": lambda: linux.futex_wake(ctypes.addressof(word))}
    try:
        import cupy
    except ImportError as error:
        missing.append(Missing("CuPy's own record and wait", str(error)))
        return {}
    theirs = cupy.cuda.Event(disable_timing=True)
    external = cupy.cuda.Stream(non_blocking=True)
    ours = ipcsync.Event(device)
    return {
        "cupy Event.record": lambda: theirs.record(external),
        "cupy Stream.wait_event": lambda: external.wait_event(theirs),
        "ipcsync.Event.record": lambda: ours.record(stream),
        "ipcsync.Event.wait": lambda: ours.wait(stream),
    }


def several_waits(stream: Any, address: int) -> dict[str, Call]:
    """Two and four waits of a stream, for a word at `address` that is at least 1: one by one, and in one call of the
    driver. What a writer with as many readers would put on its stream."""
    from cuda.bindings import driver

    handle = driver.CUstream(int(stream._raw))

    def one_by_one(count: int) -> None:
        for _ in range(count):
            driver.cuStreamWaitValue64(handle, address, 1, 0)

    def batched(operations: list[Any]) -> None:
        for each in operations:
            each.waitValue.address, each.waitValue.value64 = address, 1
        (status,) = driver.cuStreamBatchMemOp(handle, len(operations), operations, 0)
        if status:
            raise RuntimeError(f"cuStreamBatchMemOp answered {status}")

    two, four = (stream._backend._operations(count) for count in (2, 4))
    return {
        "2 waits by cuda-bindings, one by one": lambda: one_by_one(2),
        "2 waits in one cuStreamBatchMemOp": lambda: batched(two),
        "4 waits by cuda-bindings, one by one": lambda: one_by_one(4),
        "4 waits in one cuStreamBatchMemOp": lambda: batched(four),
    }
