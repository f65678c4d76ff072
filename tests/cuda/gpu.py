"""Kernels and a page of words for tests on a GPU. A stream is held by a word that the host stores, not by a sleep."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ipcsync.backends import select
from ipcsync.backends.cuda import CudaBackend
from ipcsync.backends.cuda_driver import check
from ipcsync.shm import Region

_SPIN = r"""extern "C" __global__ void spin(long long ns, unsigned long long* out, unsigned long long value) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
  if (out) *out = value;
}"""
_ADD = r"""extern "C" __global__ void add(long long ns, unsigned long long* in, unsigned long long* out, long long n,
                                       unsigned long long plus) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
  for (long long i = threadIdx.x; i < n; i += blockDim.x) out[i] = (in ? in[i] : 0) + plus;
}"""


def here() -> CudaBackend:
    """This process's backend. In a child that serves several tests one of its own would not do: what a backend has
    registered is CUDA's until the process ends, so the backend must know of it as long."""
    made = select.backend("cuda")
    assert isinstance(made, CudaBackend)
    return made


@cache
def _kernel(source: str, name: str) -> Any:
    import cupy

    return cupy.RawKernel(source, name)


def spin(backend: CudaBackend, raw: Any, milliseconds: float, out: int = 0, value: int = 0) -> None:
    """A kernel that runs that long on the stream, then stores `value` at the address `out`."""
    import cupy

    with backend.using_stream(raw, 0):
        arguments = (cupy.int64(milliseconds * 1e6), cupy.uint64(out), cupy.uint64(value))
        _kernel(_SPIN, "spin")((1,), (1,), arguments)


def add_one(source: Any, target: Any, microseconds: float = 0) -> None:
    """On CuPy's current stream: spins, then target[i] = source[i] + 1 (uint64)."""
    _launch(source, target, microseconds, 1)


def copy(source: Any, target: Any) -> None:
    """On CuPy's current stream: target[i] = source[i] (uint64)."""
    _launch(source, target, 0, 0)


def fill(target: Any, value: int, microseconds: float = 0) -> None:
    """On CuPy's current stream: spins, then target[i] = value (uint64)."""
    import cupy

    _launch(cupy.uint64(0), target, microseconds, value)


def _launch(source: Any, target: Any, microseconds: float, plus: int) -> None:
    import cupy

    arguments = (cupy.int64(microseconds * 1e3), source, target, cupy.int64(target.size), cupy.uint64(plus))
    _kernel(_ADD, "add")((1,), (256,), arguments)


def page(directory: Path, nbytes: int = 4096) -> Region:
    """A shared page under a name of its own; ``Region.open(page.path)`` maps it elsewhere."""
    return Region.create(directory / f"page-{secrets.token_hex(4)}", nbytes)


def hold(backend: CudaBackend, raw: int) -> Region:
    """Keeps a stream from going on until word 0 of what is returned is 1, or for as long as this process lives."""
    region = page(Path(os.environ["IPCSYNC_RUNTIME_DIR"]))
    region.path.unlink()
    backend.register(region)
    backend.wait(raw, region, 0, 1)
    return region


@contextmanager
def words(backend: CudaBackend, directory: Path) -> Iterator[Region]:
    """A page that the device reaches, for a block."""
    region = page(directory)
    backend.register(region)
    try:
        yield region
    finally:
        for index in range(len(region.words)):  # whatever still waits is let go
            region.words[index] = 2**63 - 1
        backend.unregister(region)
        os.unlink(region.path)
        region.close()


def word_at(backend: CudaBackend, pointer: int) -> int:
    """The 64-bit word at a device address, read behind nothing."""
    from cuda.bindings import driver

    out = ctypes.c_uint64()
    raw = backend.new_stream(0, 0)
    with backend.using(0):
        check(driver.cuMemcpyDtoHAsync(ctypes.addressof(out), pointer, 8, raw), "cuMemcpyDtoHAsync")
    backend.stream_synchronize(raw)
    backend.drop_stream(raw)
    return out.value
