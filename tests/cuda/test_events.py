"""CUDA events of the backend: across processes, with torch, at their limit, and in every state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ipcsync import errors
from ipcsync.backends.cuda import CudaBackend
from ipcsync.backends.cuda_events import EVENT_LIMIT
from ipcsync.shm import Region

from ..harness import Child, Peer, wait_until
from . import gpu

pytestmark = pytest.mark.cuda


def _records(peer: Peer, event: bytes, memory: bytes) -> None:
    backend = gpu.here()
    opened = backend.event_open(0, event)
    with pytest.raises(errors.NotExportable):
        backend.event_export(opened)
    there = backend.open_memory(0, memory, 8, writable=True)
    raw = backend.new_stream(0, 0)
    gpu.spin(backend, raw, 0)
    backend.stream_synchronize(raw)
    gpu.spin(backend, raw, 200, there.pointer, 42)
    backend.event_record(opened, raw)
    peer.send("recorded")
    backend.stream_synchronize(raw)
    backend.event_destroy(opened)
    backend.free(there)


def test_a_stream_waits_for_another_process(backend: CudaBackend, spawn: Callable[..., Child]) -> None:
    event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    assert backend.event_query(event)
    memory = backend.allocate(0, 8, "")
    child = spawn(_records, backend.event_export(event), memory.handle)
    child.recv()
    raw = backend.new_stream(0, 0)
    backend.event_wait(event, raw)
    assert not backend.event_query(event)
    backend.stream_synchronize(raw)
    assert gpu.word_at(backend, memory.pointer) == 42
    assert backend.event_query(event)
    child.join()
    backend.event_destroy(event)
    backend.free(memory)
    backend.drop_stream(raw)


def test_handles_that_are_none(backend: CudaBackend) -> None:
    for bad in (b"", b"\1" * 10, b"\1" * 64, b"\0" * 64):
        with pytest.raises(errors.HandleInvalid):
            backend.event_open(0, bad)
        with pytest.raises(errors.HandleInvalid):
            backend.open_memory(0, bad, 8, writable=True)
    event = backend.event_create(0, timing=False, blocking=False, interprocess=False)
    with pytest.raises(errors.NotExportable):
        backend.event_export(event)
    backend.event_destroy(event)


def _torch(peer: Peer, handle: bytes) -> None:
    import torch

    event = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), handle)
    peer.send("opened")
    stream = torch.cuda.Stream()
    held = gpu.hold(gpu.here(), stream.cuda_stream)
    event.record(stream)
    peer.send("recorded")
    peer.recv()
    held.words[0] = 1
    mine = torch.cuda.Event(interprocess=True)
    mine.record()
    peer.send(mine.ipc_handle())
    peer.recv()
    torch.cuda.synchronize()


def test_torch_opens_ours_and_we_open_torchs(backend: CudaBackend, spawn: Callable[..., Child]) -> None:
    event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    child = spawn(_torch, backend.event_export(event))
    assert child.recv(90) == "opened"
    child.recv()
    assert not backend.event_query(event)
    child.send()
    backend.event_synchronize(event)
    theirs = backend.event_open(0, child.recv())
    backend.event_synchronize(theirs)
    child.send()
    child.join()
    backend.event_destroy(theirs)
    backend.event_destroy(event)


def test_elapsed_time_agrees_with_a_known_kernel(backend: CudaBackend) -> None:
    raw = backend.new_stream(0, 0)
    begin, end = (backend.event_create(0, timing=True, blocking=False, interprocess=False) for _ in range(2))
    untimed = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    with pytest.raises(errors.InvalidState, match="recorded"):
        backend.event_elapsed(begin, end)
    gpu.spin(backend, raw, 0)
    backend.event_record(begin, raw)
    gpu.spin(backend, raw, 50)
    backend.event_record(end, raw)
    backend.event_record(untimed, raw)
    with pytest.raises(errors.InvalidState, match="complete"):
        backend.event_elapsed(begin, end)
    backend.event_synchronize(end)
    assert 49.0 < backend.event_elapsed(begin, end) < 75.0
    backend.event_synchronize(untimed)
    with pytest.raises(errors.InvalidState, match="enable_timing"):
        backend.event_elapsed(begin, untimed)
    for event in (begin, end, untimed):
        backend.event_destroy(event)
    backend.drop_stream(raw)


def test_the_limit_of_interprocess_events_and_many_cycles(backend: CudaBackend) -> None:
    events, held = [], backend._quarantine.held  # what a dead process recorded, in another test, stays there for good

    def fill() -> None:
        while len(events) <= EVENT_LIMIT:
            events.append(backend.event_create(0, timing=False, blocking=False, interprocess=True))

    with pytest.raises(errors.QuotaExceeded, match="timeline"):
        fill()
    assert EVENT_LIMIT - 64 < len(events) <= EVENT_LIMIT
    for event in events:
        backend.event_destroy(event)
    for _ in range(25_000):
        backend.event_destroy(backend.event_create(0, timing=False, blocking=False, interprocess=True))
    assert backend._quarantine.held <= held


def test_an_event_in_use_is_destroyed_only_when_its_work_is_done(backend: CudaBackend, region: Region) -> None:
    raw, held = backend.new_stream(0, 0), backend._quarantine.held
    event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    backend.wait(raw, region, 0, 1)
    backend.event_record(event, raw)
    backend.event_destroy(event)
    assert backend._quarantine.held == held + 1
    other = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    backend.event_destroy(other)
    assert backend._quarantine.held == held + 1, "one that never ends held up another"
    region.words[0] = 1
    backend.stream_synchronize(raw)
    wait_until(lambda: backend._quarantine.held == held, "the end of the quarantine")
    backend.drop_stream(raw)


class Wrapped:
    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def test_streams_by_any_name(backend: CudaBackend) -> None:
    import cupy
    import torch

    ours = backend.new_stream(0, 0)
    theirs = cupy.cuda.Stream(non_blocking=True)
    assert backend.foreign_stream(theirs) == (theirs.ptr, 0)
    assert backend.foreign_stream(theirs.ptr) == (theirs.ptr, 0)
    assert backend.foreign_stream(Wrapped(ours)) == (ours, 0)
    assert backend.foreign_stream(cupy.cuda.Stream.from_external(Wrapped(ours))) == (ours, 0)
    named = torch.cuda.Stream()
    assert backend.foreign_stream(named) == (named.cuda_stream, 0)
    plain = torch.Stream(device="cuda")
    found = backend.foreign_stream(plain)
    assert found is not None
    assert found[0] > 2
    assert backend.foreign_stream("stream") is None
    assert backend.foreign_stream(object()) is None
    assert backend.stream_key(backend.foreign_stream(cupy.cuda.Stream.null)[0]) == backend.stream_key(  # type: ignore[index]
        backend.foreign_stream(torch.cuda.default_stream())[0]  # type: ignore[index]
    )
    torch.zeros(1, device="cuda")
    with theirs, pytest.raises(errors.AmbiguousStream):
        backend.current_stream(0)
    with theirs, torch.cuda.stream(torch.cuda.ExternalStream(theirs.ptr)):
        assert backend.current_stream(0) == theirs.ptr
    with backend.using_stream(ours, 0):
        assert cupy.cuda.get_current_stream().ptr == ours
        with backend.using_stream(theirs.ptr, 0):
            assert cupy.cuda.get_current_stream().ptr == theirs.ptr
        assert cupy.cuda.get_current_stream().ptr == ours
    assert cupy.cuda.get_current_stream().ptr == 0
    backend.drop_stream(ours)
