"""Words that streams write and wait for; the wait budget; capture; contexts and devices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ipcsync import errors
from ipcsync.backends.cuda import CudaBackend
from ipcsync.shm import Region

from ..harness import Child, Peer, wait_until
from . import gpu

pytestmark = pytest.mark.cuda


def test_a_stream_waits_for_a_word_and_writes_another(backend: CudaBackend, region: Region) -> None:
    raw = backend.new_stream(0, 0)
    backend.wait(raw, region, 0, 5)
    backend.write(raw, region, 8, 7)
    gpu.spin(backend, backend.new_stream(0, 0), 20)
    assert region.words[8] == 0
    assert not backend.stream_query(raw)
    region.words[0] = 4
    assert not backend.stream_query(raw)
    region.words[0] = 5
    backend.stream_synchronize(raw)
    assert region.words[8] == 7
    backend.drop_stream(raw)


@pytest.mark.parametrize("count", [2, 300])
def test_a_stream_waits_for_all_words_of_several(backend: CudaBackend, region: Region, count: int) -> None:
    first, second = backend.new_stream(0, 0), backend.new_stream(0, 0)
    backend.wait_for_all(first, region, [(index, 5) for index in range(count)])
    backend.wait_for_all(second, region, [(index, 6) for index in range(count)])
    for last in range(count):
        region.words[last] = 4
        assert not backend.stream_query(first)
        region.words[last] = 5
    backend.stream_synchronize(first)
    assert not backend.stream_query(second)
    for index in range(count):
        region.words[index] = 6
    backend.stream_synchronize(second)


def test_a_released_word_is_never_below_any_round(backend: CudaBackend, region: Region) -> None:
    raw = backend.new_stream(0, 0)
    region.words[0] = 2**63 - 1
    backend.wait(raw, region, 0, 2**44)
    backend.wait(raw, region, 0, 1)
    backend.stream_synchronize(raw)
    backend.drop_stream(raw)


def _writes(peer: Peer, path: Path) -> None:
    backend, region = gpu.here(), Region.open(path)
    backend.register(region)
    raw = backend.new_stream(0, 0)
    peer.send("ready")
    for n in range(1, 101):
        backend.wait(raw, region, 0, n)
        backend.write(raw, region, 8, n)
    backend.stream_synchronize(raw)


def test_two_processes_take_turns_on_the_device(
    backend: CudaBackend, region: Region, spawn: Callable[..., Child]
) -> None:
    child = spawn(_writes, region.path)
    child.recv()
    raw = backend.new_stream(0, 0)
    for n in range(1, 101):
        backend.write(raw, region, 0, n)
        backend.wait(raw, region, 8, n)
    backend.stream_synchronize(raw)
    assert region.words[8] == 100
    child.join()
    backend.drop_stream(raw)


def test_the_host_does_not_wait_for_the_device(backend: CudaBackend, region: Region) -> None:
    raw = backend.new_stream(0, 0)
    gpu.spin(backend, raw, 0)
    backend.stream_synchronize(raw)
    event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    gpu.spin(backend, raw, 300)
    backend.write(raw, region, 0, 1)
    backend.wait(raw, region, 8, 1)
    backend.event_record(event, raw)
    backend.event_wait(event, raw)
    assert region.words[0] == 0, "the kernel ended before the host was through"
    assert not backend.event_query(event)
    region.words[8] = 1
    backend.stream_synchronize(raw)
    assert region.words[0] == 1
    backend.event_destroy(event)
    backend.drop_stream(raw)


@pytest.mark.parametrize("pointer", [0, 1, 2])
def test_default_streams(backend: CudaBackend, region: Region, pointer: int) -> None:
    found = backend.foreign_stream(pointer)
    assert found is not None
    raw, device = found
    assert device == 0
    backend.write(raw, region, 0, 3)
    backend.wait(raw, region, 0, 3)
    backend.stream_synchronize(raw)
    assert region.words[0] == 3
    event = backend.event_create(0, timing=False, blocking=False, interprocess=False)
    backend.event_record(event, raw)
    backend.event_wait(event, raw)
    backend.event_synchronize(event)
    backend.event_destroy(event)
    assert (backend.stream_key(raw) == backend.stream_key(backend.current_stream(0))) is (pointer < 2)


def test_capture_is_refused_and_not_broken(backend: CudaBackend, region: Region) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    calls: list[Callable[[], Any]] = [
        lambda: backend.write(stream.ptr, region, 0, 1),
        lambda: backend.wait(stream.ptr, region, 0, 1),
        lambda: backend.event_record(event, stream.ptr),
        lambda: backend.event_wait(event, stream.ptr),
    ]
    stream.begin_capture()
    for call in calls:
        with pytest.raises(errors.CaptureUnsupported):
            call()
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert region.words[0] == 0
    for call in calls:
        call()
    stream.synchronize()
    backend.event_destroy(event)


def test_any_thread_without_a_context_of_its_own(backend: CudaBackend, region: Region) -> None:
    from cuda.bindings import driver

    raw, null = backend.new_stream(0, 0), backend.current_stream(0)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            event = backend.event_create(0, timing=True, blocking=False, interprocess=False)
            shared = backend.event_create(0, timing=False, blocking=False, interprocess=True)
            for stream in (raw, null):
                backend.write(stream, region, 0, 1)
                backend.wait(stream, region, 0, 1)
                for e in (event, shared):
                    backend.event_record(e, stream)
                    backend.event_wait(e, stream)
                    backend.event_synchronize(e)
                backend.stream_query(stream)
                backend.stream_synchronize(stream)
            backend.event_export(shared)
            backend.event_elapsed(event, event)
            memory = backend.allocate(0, 100, "")
            backend.free(memory)
            backend.event_destroy(event)
            backend.event_destroy(shared)
            backend.drop_stream(backend.new_stream(0, -1))
            assert backend.current_device() == 0
            assert backend.foreign_stream(raw) == (raw, 0)
            assert int(driver.cuCtxGetCurrent()[1]) == 0, "a context was left current"
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    backend.drop_stream(raw)


def test_devices_by_uuid(backend: CudaBackend) -> None:
    name = backend.uuid(0)
    assert name.startswith(("GPU-", "MIG-"))
    assert backend.index(name) == 0
    with pytest.raises(errors.DeviceNotVisible, match="CUDA_VISIBLE_DEVICES"):
        backend.index("GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(errors.DeviceUnavailable, match="ipcsync doctor"):
        backend.new_stream(99, 0)


def test_a_read_only_page_can_be_registered(backend: CudaBackend, region: Region) -> None:
    reader = Region.open(region.path, writable=False)
    backend.register(reader)
    backend.register(reader)
    raw = backend.new_stream(0, 0)
    region.words[0] = 9
    backend.wait(raw, reader, 0, 9)
    backend.stream_synchronize(raw)
    backend.unregister(reader)
    backend.unregister(reader)
    reader.close()
    backend.drop_stream(raw)


def test_pages_come_and_go(backend: CudaBackend, runtime: Path) -> None:
    raw = backend.new_stream(0, 0)
    for n in range(200):
        with gpu.words(backend, runtime) as region:
            backend.write(raw, region, n % 16, n)
            backend.stream_synchronize(raw)
            assert region.words[n % 16] == n
    backend.drop_stream(raw)


def _reached(region: Region, index: int, value: int) -> bool:
    return region.words[index] >= value


def _stands(peer: Peer, path: Path) -> int:
    """Blocks as many streams as the limit says, any of many; the others go on, a few at a time."""
    backend, region = gpu.here(), Region.open(path)
    backend.register(region)
    limit = backend.blocked_limit(0)
    at_once = backend._queues[0] - limit
    streams = [backend.new_stream(0, 0) for _ in range(2 * limit + 8)]
    for offset in range(3):
        blocked = streams[offset::2][:limit]
        free = [raw for raw in streams if raw not in blocked]
        for raw in blocked:
            backend.wait(raw, region, 0, offset + 1)
        for begin in range(0, len(free), at_once):
            burst = range(begin, min(begin + at_once, len(free)))
            for n in burst:
                backend.write(free[n], region, 8 + n, offset + 1)
            for n in burst:
                wait_until(partial(_reached, region, 8 + n, offset + 1), f"stream {n} behind {limit} blocked ones", 5)
        region.words[0] = offset + 1
        for raw in streams:
            backend.stream_synchronize(raw)
    return limit


@pytest.mark.fresh("children")
@pytest.mark.parametrize("connections", [None, "32", "4"])
def test_the_limit_of_blocked_streams_holds(
    backend: CudaBackend,
    region: Region,
    spawn: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    connections: str | None,
) -> None:
    if connections is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    limit = spawn(_stands, region.path).join()
    mps = backend._devices.attribute(0, "MPS_ENABLED") == 1
    assert limit == {None: 1 if mps else 6, "32": 24, "4": 3}[connections]


def _too_late(peer: Peer) -> int:
    backend = gpu.here()
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    backend.drop_stream(backend.new_stream(0, 0))  # CUDA starts, and reads the variable
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    return backend.blocked_limit(0)


@pytest.mark.fresh("children")
def test_the_limit_is_probed_not_believed(spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert spawn(_too_late).join() < 24


def test_memory_operations_work(backend: CudaBackend) -> None:
    assert backend.memory_operations(0)


_BAD = r"""extern "C" __global__ void bad(unsigned long long* p) { *p = 1; }"""


def _faults(peer: Peer, path: Path) -> list[str]:
    import cupy

    backend, region = gpu.here(), Region.open(path)
    backend.register(region)
    raw = backend.new_stream(0, 0)
    event = backend.event_create(0, timing=False, blocking=False, interprocess=False)
    with backend.using_stream(raw, 0):
        cupy.RawKernel(_BAD, "bad")((1,), (1,), (cupy.uint64(8),))
    said = []
    for call in (
        lambda: backend.stream_synchronize(raw),
        lambda: backend.write(raw, region, 0, 1),
        lambda: backend.wait(raw, region, 0, 1),
        lambda: backend.event_query(event),
        lambda: backend.event_record(event, raw),
        lambda: backend.allocate(0, 8, ""),
    ):
        try:
            call()
        except errors.DeviceLost as error:
            said.append("lost" if "start it again" in str(error) else str(error))
    peer.send(said)
    os._exit(0)


@pytest.mark.kills
@pytest.mark.fresh("children")
def test_a_lost_context_is_said_so(region: Region, spawn: Callable[..., Child]) -> None:
    child = spawn(_faults, region.path)
    assert child.recv() == ["lost"] * 6
    child.process.join()
