"""Shared events and channels on a GPU, across processes: values checked behind slow kernels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, errors
from ipcsync.backends import select

from ..harness import Child, Peer, wait_until
from . import gpu

pytestmark = pytest.mark.cuda
Spawn = Callable[..., Child]
VIAS = ("auto", "timeline", "cuda-event")
ROUNDS = int(os.environ.get("IPCSYNC_ROUNDS", "1000"))


def create(session: Session, name: str, via: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # cuda-event says what it cannot promise
        return session.create_event(name, device="cuda", via=via)  # type: ignore[arg-type]


def _stream() -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


# -- a chain of three processes


def _source(peer: Peer, rounds: int) -> None:
    with ipcsync.connect(name="source") as session, session.open_channel("raw").writer() as writer:
        peer.send("attached")
        peer.recv()
        stream = _stream()
        for n in range(1, rounds + 1):
            with writer.slot(stream) as slot:
                gpu.fill(slot.array, n, microseconds=30)


def _middle(peer: Peer) -> None:
    with (
        ipcsync.connect(name="middle") as session,
        session.open_channel("raw").reader() as reader,
        session.open_channel("done").writer() as writer,
    ):
        peer.send("attached")
        stream = _stream()
        for slot in reader.slots(stream):
            with writer.slot(stream) as out:
                gpu.add_one(slot.array, out.array, microseconds=30)


def test_a_chain_of_three_processes_over_buffers_used_again(session: Session, spawn: Spawn) -> None:
    import cupy

    rounds, size = ROUNDS, 4096
    for name in ("raw", "done"):
        session.create_channel(name, shape=(size,), dtype="uint64", depth=3, device="cuda")
    seen = cupy.zeros((rounds, size), cupy.uint64)
    cupy.cuda.get_current_stream().synchronize()
    with session.open_channel("done").reader() as reader:
        middle, source = spawn(_middle), spawn(_source, rounds)
        assert middle.recv(60) == source.recv(60) == "attached"
        source.send("go")
        stream, numbers = _stream(), []
        for slot in reader.slots(stream):
            gpu.copy(slot.array, seen[slot.number - 1])
            numbers.append(slot.number)
        stream.synchronize()
    source.join()
    middle.join()
    assert numbers == list(range(1, rounds + 1))
    expected = cupy.arange(2, rounds + 2, dtype=cupy.uint64)[:, None]
    assert bool((seen == expected).all())


# -- waits before records


def _waits_first(peer: Peer, name: str, rounds: int) -> int:
    import cupy

    good = 0
    with ipcsync.connect(name="waiter") as session, session.open_channel("values").reader(start="oldest") as reader:
        event, stream = session.open_event(name), _stream()
        slot = reader.get(stream)
        out = cupy.zeros(1, cupy.uint64)
        cupy.cuda.get_current_stream().synchronize()
        for n in range(1, rounds + 1):
            peer.send(n)
            event.wait(stream, round=n)
            with stream:
                gpu.copy(slot.array, out)
            stream.synchronize()
            good += int(out.get(stream)[0]) == n
            assert event.query(round=n)
        slot.release()
    return good


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.watchdog(120)
def test_a_wait_before_its_record_ends_after_the_work(session: Session, spawn: Spawn, via: str) -> None:
    rounds, backend = ROUNDS, select.backend("cuda")
    event = create(session, "late", via)
    stream = ipcsync.Stream("cuda")
    session.create_channel("values", shape=(1,), dtype="uint64", depth=2, device="cuda")
    with session.open_channel("values").writer() as writer:
        child = spawn(_waits_first, "late", rounds)
        with writer.slot(stream) as slot:
            array = slot.array
            gpu.fill(array, 0)
        for n in range(1, rounds + 1):
            assert child.recv() == n
            # The slow ones still run when the host has seen the record: a wait that waits for nothing is too early.
            gpu.spin(backend, stream._raw, 5.0 if n % 20 == 1 else 0.05, array.data.ptr, n)
            assert event.record(stream) == n
        assert child.join() == rounds


# -- the host does not wait


def test_record_and_wait_return_while_a_kernel_runs(session: Session) -> None:
    backend = select.backend("cuda")
    slow, fast = ipcsync.Stream("cuda"), ipcsync.Stream("cuda")
    event = session.create_event("slow", device="cuda")
    gpu.spin(backend, slow._raw, 0)
    event.record(slow)
    event.synchronize()
    gpu.spin(backend, slow._raw, 300)
    n = event.record(slow)
    event.wait(fast, round=n)
    assert not event.query(round=n), "the kernel ended before record and wait had returned"
    assert not fast.query()
    event.synchronize(round=n)
    fast.synchronize()


def test_rounds_complete_in_order_on_a_slow_and_a_fast_stream(session: Session) -> None:
    backend = select.backend("cuda")
    slow, fast, waiter = (ipcsync.Stream("cuda") for _ in range(3))
    event = session.create_event("ordered", device="cuda")
    memory = backend.allocate(0, 8, "")
    gpu.spin(backend, slow._raw, 100, memory.pointer, 77)
    assert event.record(slow) == 1
    assert event.record(fast) == 2
    event.wait(waiter, round=2)
    assert event.completed == 0
    waiter.synchronize()
    assert gpu.word_at(backend, memory.pointer) == 77
    assert event.completed == 2
    backend.free(memory)


@pytest.mark.parametrize("kind", ["null", "blocking", "non-blocking", "torch", "per-thread", "ours"])
def test_work_on_any_stream(session: Session, kind: str) -> None:
    import cupy
    import torch

    streams = {
        "null": lambda: cupy.cuda.Stream.null,
        "blocking": cupy.cuda.Stream,
        "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
        "torch": torch.cuda.Stream,
        "per-thread": lambda: cupy.cuda.Stream.ptds,
        "ours": lambda: ipcsync.Stream("cuda"),
    }
    backend, stream = select.backend("cuda"), streams[kind]()
    found = backend.foreign_stream(stream)
    raw = stream._raw if found is None else found[0]
    event, memory = session.create_event(f"on-{kind}", device="cuda"), backend.allocate(0, 8, "")
    other = ipcsync.Stream("cuda")
    for n in range(1, 20):
        gpu.spin(backend, raw, 1, memory.pointer, n)
        assert event.record(stream) == n
        event.wait(other, round=n)
        other.synchronize()
        assert gpu.word_at(backend, memory.pointer) == n
    event.wait(stream, round=19)
    event.synchronize()
    backend.free(memory)


# -- two readers, of which one is slow; torch in one process, CuPy in another


def _reads(peer: Peer, microseconds: float) -> int:
    import cupy

    total = 0
    with ipcsync.connect() as session, session.open_channel("frames").reader() as reader:
        peer.send("attached")
        stream, out = _stream(), cupy.zeros(1000, cupy.uint64)
        cupy.cuda.get_current_stream().synchronize()
        for slot in reader.slots(stream):
            gpu.add_one(slot.array, out, microseconds)
            stream.synchronize()
            total += bool((out.get(stream) == slot.number + 1).all())
    return total


def test_two_readers_of_which_one_is_slow(session: Session, spawn: Spawn) -> None:
    session.create_channel("frames", shape=(1000,), dtype="uint64", depth=3, device="cuda")
    readers = [spawn(_reads, 0), spawn(_reads, 2000)]
    for reader in readers:
        reader.recv(60)
    stream = _stream()
    with session.open_channel("frames").writer() as writer:
        for n in range(1, 201):
            with writer.slot(stream) as slot:
                gpu.fill(slot.array, n)
    assert [reader.join() for reader in readers] == [200, 200]


def _torch_reads(peer: Peer) -> list[float]:
    import torch

    sums = []
    with ipcsync.connect(streams="torch") as session, session.open_channel("numbers").reader() as reader:
        peer.send("attached")
        side = torch.cuda.Stream()
        for slot in reader.slots(side):
            with torch.cuda.stream(side):
                sums.append(torch.as_tensor(slot.array, device="cuda").float().sum())
            side.synchronize()
    return [float(each) for each in sums]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_torch_reads_what_cupy_writes(session: Session, spawn: Spawn, dtype: str) -> None:
    session.create_channel("numbers", shape=(8,), dtype=dtype, depth=2, device="cuda")
    child = spawn(_torch_reads)
    child.recv(60)
    with session.open_channel("numbers").writer() as writer:
        for n in range(1, 51):
            with writer.slot(_stream()) as slot:  # which nothing but the slot keeps alive
                slot.array[...] = n
            slot.confirm()
    assert child.join() == [8.0 * n for n in range(1, 51)]


# -- death


def _records_slowly(peer: Peer, name: str) -> None:
    with ipcsync.connect(name="victim") as session:
        event, stream = session.open_event(name), ipcsync.Stream("cuda")
        backend = select.backend("cuda")
        gpu.spin(backend, stream._raw, 0)
        event.record(stream)
        event.synchronize()
        gpu.spin(backend, stream._raw, 5000)
        peer.send(event.record(stream))
        peer.recv()


def _released(stream: ipcsync.Stream) -> bool:
    try:
        return stream.query()
    except errors.DeviceLost:  # under MPS a client that is killed in a kernel takes the others' contexts along
        if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") is None:
            raise
        return True


@pytest.mark.parametrize("via", ["auto", "timeline"])
def test_a_killed_recorders_waiters_go_on_and_are_told(session: Session, spawn: Spawn, via: str) -> None:
    event, stream = create(session, "mortal", via), ipcsync.Stream("cuda")
    child = spawn(_records_slowly, "mortal")
    n = child.recv(60)
    event.wait(stream, round=n)
    assert not stream.query()
    child.kill()
    with pytest.raises(errors.PeerDied, match="victim"):
        event.synchronize(round=n)
    wait_until(lambda: _released(stream), "the release of the stream that waited")
    with pytest.raises(errors.PeerDied):
        event.wait(stream, round=n)
    assert event.completed == n - 1


# -- the CUDA event of a shared event


def _opens_with_torch(peer: Peer, name: str) -> bool:
    import torch

    with ipcsync.connect() as session:
        event = session.open_event(name)
        peer.send("attached")
        ours = event.cuda_event(timeout=20)
        theirs = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), ours.ipc_handle())
        streams = [torch.cuda.Stream() for _ in range(2)]
        peer.send("opened")
        peer.recv()  # behind a kernel that takes a while
        ours.wait(streams[0])
        theirs.wait(streams[1])
        early = [stream.query() for stream in streams]
        event.close()  # what was handed out lives on
        for stream in streams:
            stream.synchronize()
        assert ours.query()
        assert ours.cuda_event > 0
        return early == [False, False] and theirs.query()


def test_its_cuda_event_is_recorded_once_somebody_asked(session: Session, spawn: Spawn) -> None:
    backend, stream = select.backend("cuda"), ipcsync.Stream("cuda")
    event = session.create_event("mirrored", device="cuda")
    child = spawn(_opens_with_torch, "mirrored")
    child.recv(60)
    gpu.spin(backend, stream._raw, 0)
    while not child._connection.poll(0.001):
        event.record(stream)
    assert child.recv() == "opened"
    gpu.spin(backend, stream._raw, 1000)
    event.record(stream)
    child.send()
    assert child.join() is True
