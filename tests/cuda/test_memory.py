"""GPU memory: made, opened, exported, looked at; and what cannot be exported says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ipcsync import dtypes, errors
from ipcsync.backends.base import Memory
from ipcsync.backends.cuda import CudaBackend
from ipcsync.shm import Region

from ..harness import Child, Peer, wait_until
from . import gpu

pytestmark = pytest.mark.cuda


def _adds(peer: Peer, handle: bytes, nbytes: int) -> int:
    backend = gpu.here()
    first = backend.open_memory(0, handle, nbytes, writable=True)
    second = backend.open_memory(0, handle, nbytes, writable=True)
    assert first.pointer == second.pointer
    view = backend.array(first, 0, (nbytes // 8,), "uint64")
    backend.free(second)
    view += 1
    total = int(view.sum())
    backend.free(first)
    again = backend.open_memory(0, handle, nbytes, writable=True)
    assert int(backend.array(again, 0, (nbytes // 8,), "uint64").sum()) == total
    backend.free(again)
    return total


def test_another_process_writes_into_it(backend: CudaBackend, spawn: Callable[..., Child]) -> None:
    import cupy

    memory = backend.allocate(0, 8000, "")
    view = backend.array(memory, 0, (1000,), "uint64")
    assert int(view.sum()) == 0
    view[:] = cupy.arange(1000)
    backend.stream_synchronize(backend.current_stream(0))
    assert spawn(_adds, memory.handle, 8000).join() == 1000 * 999 // 2 + 1000
    assert int(view[999]) == 1000
    ours = backend.open_memory(0, memory.handle, 8000, writable=True)
    assert ours.pointer == memory.pointer
    backend.free(memory)
    view[:] = 3
    assert int(view.sum()) == 3000
    backend.free(ours)


def test_small_allocations_are_apart_and_memory_comes_back(backend: CudaBackend) -> None:
    from cuda.bindings import driver

    first, second = backend.allocate(0, 8, ""), backend.allocate(0, 8, "")
    assert first.handle != second.handle
    backend.free(first)
    backend.free(second)
    with backend.using(0):
        before = driver.cuMemGetInfo()[1]
    for _ in range(500):
        backend.free(backend.allocate(0, 64 << 20, ""))
    with backend.using(0):
        assert before - driver.cuMemGetInfo()[1] < 8 << 30, "of 500 times 64 MiB"
    with pytest.raises(errors.OutOfSpace, match="free"):
        backend.allocate(0, 1 << 50, "")


def test_freeing_does_not_wait_for_a_blocked_stream(backend: CudaBackend, region: Region) -> None:
    raw, held = backend.new_stream(0, 0), backend._quarantine.held
    memory = backend.allocate(0, 8, "")
    backend.wait(raw, region, 0, 1)
    backend.free(memory)
    assert not backend.stream_query(raw)
    region.words[0] = 1
    wait_until(lambda: backend._quarantine.held <= held, "the end of the quarantine")
    backend.drop_stream(raw)


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_arrays_of_every_dtype(backend: CudaBackend, name: str) -> None:
    memory = backend.allocate(0, 4096, "")
    view = backend.array(memory, 256, (4, 6), name)
    assert view.shape == (4, 6)
    assert dtypes.dtype_name(view.dtype) == name
    assert view.data.ptr == memory.pointer + 256
    view.view("uint8")[...] = 1  # CuPy has no kernels for every one of these types, but any can be looked at
    stored = view.get()
    assert stored.dtype == dtypes.numpy_dtype(name)
    assert stored.tobytes() == b"\1" * view.nbytes
    backend.free(memory)


def test_strides_and_other_frameworks_read_without_a_copy(backend: CudaBackend) -> None:
    import cupy
    import torch

    memory = backend.allocate(0, 4096, "")
    flat = backend.array(memory, 0, (16,), "float32")
    flat[:] = cupy.arange(16)
    columns = backend.array(memory, 0, (4, 2), "float32", (4, 32))
    assert columns.get().tolist() == [[0, 8], [1, 9], [2, 10], [3, 11]]
    shared = torch.from_dlpack(flat)
    assert shared.data_ptr() == memory.pointer
    shared += 1
    torch.cuda.synchronize()
    assert float(flat[0]) == 1
    assert torch.as_tensor(flat, device="cuda").data_ptr() == memory.pointer
    with pytest.raises(errors.InvalidArgument):
        backend.array(memory, 4096, (1,), "uint8")
    assert backend.array(memory, 4096, (0, 7), "uint8").size == 0
    backend.free(memory)


def _reads(peer: Peer, regions: list[tuple[bytes, int, int]]) -> list[float]:
    backend = gpu.here()
    out = []
    for handle, nbytes, offset in regions:
        memory = backend.open_memory(0, handle, nbytes, writable=False)
        out.append(float(backend.array(memory, offset, (4,), "float32").sum()))
        backend.free(memory)
    return out


def test_arrays_inside_pools_are_exported_with_their_offset(backend: CudaBackend, spawn: Callable[..., Child]) -> None:
    import cupy
    import torch

    pooled = [cupy.full(1000, n, cupy.float32) for n in range(3)]
    tensors = [torch.full((1000,), float(n), device="cuda") for n in range(3)]
    arrays = [pooled[1], pooled[2][500:], tensors[1], tensors[2][17:].view(torch.float32)]
    torch.cuda.synchronize()
    backend.stream_synchronize(backend.current_stream(0))
    exported = [backend.export(array) for array in arrays]
    assert exported[1][1] % 2**20 != 0
    regions = [(memory.handle, memory.nbytes, offset) for memory, offset in exported]
    assert spawn(_reads, regions).join() == [4.0, 8.0, 4.0, 8.0]
    back = backend.open_memory(0, exported[0][0].handle, exported[0][0].nbytes, writable=True)
    assert back.pointer == exported[0][0].pointer
    half = torch.ones(8, dtype=torch.bfloat16, device="cuda")
    memory, offset = backend.export(half)
    assert memory.pointer + offset == half.data_ptr()
    for each in (*(memory for memory, _ in exported), back, memory):
        backend.free(each)


def _refused(peer: Peer) -> dict[str, str]:
    import cupy
    import numpy
    import torch

    backend = gpu.here()
    cases: dict[str, Callable[[], Any]] = {
        "numpy": lambda: numpy.zeros(4),
        "a list": lambda: [1],
        "cpu tensor": lambda: torch.zeros(4),
        "pinned": lambda: torch.zeros(4).pin_memory(),
        "expandable": lambda: torch.zeros(4, device="cuda"),
        "managed": lambda: cupy.ndarray((4,), memptr=cupy.cuda.malloc_managed(32)),
        "async": lambda: cupy.ndarray((4,), memptr=cupy.cuda.MemoryAsyncPool().malloc(32)),
    }
    said = {}
    for name, make in cases.items():
        array = make()
        try:
            backend.export(array)
        except errors.NotExportable as error:
            said[name] = str(error)
    return said


def test_what_cannot_be_exported_says_why(spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    said = spawn(_refused).join(90)
    for name, reason in {
        "numpy": "no array on a GPU",
        "a list": "no array on a GPU",
        "cpu tensor": "host",
        "pinned": "host",
        "expandable": "expandable_segments",
        "managed": "managed",
        "async": "cudaMallocAsync",
    }.items():
        assert reason in said.get(name, "exported"), (name, said)
        assert "create_array" in said[name]


def _exports_again(peer: Peer, handle: bytes) -> str:
    backend = gpu.here()
    memory: Memory = backend.open_memory(0, handle, 4096, writable=True)
    with pytest.raises(errors.NotExportable) as found:
        backend.export(backend.array(memory, 0, (4,), "uint8"))
    peer.send(str(found.value))
    os._exit(0)


def test_opened_memory_is_not_shared_on(backend: CudaBackend, spawn: Callable[..., Child]) -> None:
    memory = backend.allocate(0, 4096, "")
    assert "another process" in spawn(_exports_again, memory.handle).recv()
    backend.free(memory)


def test_a_stream_reads_a_pinned_host_page(backend: CudaBackend, region: Region) -> None:
    """What a host channel's slot with pin=True stands on."""
    import cupy
    import numpy

    host = numpy.frombuffer(region.bytes, numpy.uint64)
    host[:256] = 5
    stream = cupy.cuda.Stream(non_blocking=True)
    target = cupy.zeros(256, cupy.uint64)
    backend.stream_synchronize(backend.current_stream(0))
    gpu.spin(backend, stream.ptr, 30)
    with stream:
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, region.address, 2048, 1, stream.ptr)
    backend.write(stream.ptr, region, 300, 1)
    assert region.words[300] == 0
    backend.stream_synchronize(stream.ptr)
    assert region.words[300] == 1
    assert int(target.sum()) == 5 * 256
    del host
