"""GPU memory that other processes open: made, opened once a process, exported from arrays, looked at through CuPy."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..dtypes import itemsize, numpy_dtype
from ..errors import HandleInvalid, InvalidArgument, NotExportable, OutOfSpace, Unsupported
from .base import Memory
from .cuda_driver import INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, MAP_FAILED, OUT_OF_MEMORY, Devices, check, fail

HANDLE_BYTES = 64
# CUDA carves small allocations out of blocks of this size and an IPC handle opens the whole block: a block each.
_BLOCK = 2 << 20
_CREATE = "session.create_array(name, fields) gives memory that can be shared: copy the values into that"


def handle_bytes(handle: Any) -> bytes:
    """The 64 bytes of a CUipc...Handle."""
    return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)


def fill_handle(handle: Any, raw: bytes) -> Any:
    """`handle` with those 64 bytes; ``HandleInvalid`` for another length."""
    if not isinstance(raw, bytes | bytearray | memoryview):
        raise HandleInvalid(f"a CUDA IPC handle is {HANDLE_BYTES} bytes, not a {type(raw).__name__}")
    if len(raw) != HANDLE_BYTES:
        raise HandleInvalid(f"a CUDA IPC handle is {HANDLE_BYTES} bytes, not {len(raw)}")
    ctypes.memmove(int(handle.getPtr()), bytes(raw), HANDLE_BYTES)
    return handle


@dataclass(eq=False)
class _Kept:
    """What keeps a stretch of memory: one an allocation, import or export, counted."""

    kind: str  # "made", "opened" or "exported"
    device: int
    pointer: int
    nbytes: int
    handle: bytes
    users: int = 1
    things: list[Any] = field(default_factory=list)


def cupy() -> Any:
    """CuPy, which gives arrays and the current stream; a build for AMD is refused by name."""
    try:
        import cupy as module
    except ImportError:
        raise Unsupported('arrays on cuda need CuPy: pip install "ipcsync[cuda13]" (or cuda12)') from None
    if module.cuda.runtime.is_hip:
        raise Unsupported("this CuPy is built for AMD's HIP, whose events ipcsync does not know: install a CUDA build")
    return module


class Memories:
    """`end` runs a call that waits for the device, when that harms nobody."""

    def __init__(self, driver: Any, devices: Devices, end: Callable[[Callable[[], object]], object]) -> None:
        self._driver, self._devices, self._end = driver, devices, end
        self._lock = threading.Lock()
        self._own: dict[bytes, _Kept] = {}  # by handle: made or exported here, which CUDA does not open here again
        self._opened: dict[tuple[int, bytes], _Kept] = {}

    def allocate(self, device: int, nbytes: int) -> Memory:
        driver = self._driver
        size = max(1, -(-nbytes // _BLOCK)) * _BLOCK
        with self._devices.using(device):
            status, pointer = driver.cuMemAlloc(size)
            if status == OUT_OF_MEMORY:
                free, total = check(driver.cuMemGetInfo(), "cuMemGetInfo")
                raise OutOfSpace(
                    f"{nbytes} bytes do not fit on cuda:{device} ({free} of {total} bytes are free): ask for less, or "
                    "let something go",
                    needed=nbytes,
                    path=f"cuda:{device}",
                )
            check((status, pointer), "cuMemAlloc")
            try:
                # Never the null stream: it would wait for the caller's streams, which may wait for another process.
                stream = check(driver.cuStreamCreate(1), "cuStreamCreate")
                try:
                    check(driver.cuMemsetD8Async(pointer, 0, size, stream), "cuMemsetD8Async")
                    check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
                finally:
                    driver.cuStreamDestroy(stream)
                handle = handle_bytes(check(driver.cuIpcGetMemHandle(pointer), "cuIpcGetMemHandle"))
            except BaseException:
                driver.cuMemFree(pointer)
                raise
        kept = _Kept("made", device, int(pointer), size, handle)
        with self._lock:
            self._own[handle] = kept
        return Memory(device, kept.pointer, nbytes, handle, True, kept)

    def open(self, device: int, handle: bytes, nbytes: int, writable: bool) -> Memory:
        with self._lock:
            kept = self._own.get(handle) or self._opened.get((device, handle))
            if kept is not None:
                kept.users += 1
            else:
                kept = self._import(device, handle, nbytes)
                self._opened[device, handle] = kept
        return Memory(device, kept.pointer, nbytes, handle, writable, kept)

    def _import(self, device: int, handle: bytes, nbytes: int) -> _Kept:
        driver = self._driver
        filled = fill_handle(driver.CUipcMemHandle(), handle)
        with self._devices.using(device):
            status, pointer = driver.cuIpcOpenMemHandle(
                filled, driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            )
        if status in (INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, MAP_FAILED, 208, 304):
            raise HandleInvalid(
                "these 64 bytes open no GPU memory here: they are no handle, or their process is gone, or arrays of an "
                "earlier opening still hold it",
                status=int(status),
            )
        return _Kept("opened", device, int(check((status, pointer), "cuIpcOpenMemHandle")), nbytes, handle)

    def free(self, memory: Memory) -> None:
        kept = memory.keep
        with self._lock:
            kept.users -= 1
            if kept.users:
                return
            if kept.kind == "opened":
                self._opened.pop((kept.device, kept.handle), None)
            else:
                self._own.pop(kept.handle, None)
        kept.things.clear()
        if kept.kind == "exported":
            return
        call = self._driver.cuMemFree if kept.kind == "made" else self._driver.cuIpcCloseMemHandle

        def work() -> None:
            with self._devices.using(kept.device):
                call(kept.pointer)

        self._end(work)

    # -- arrays of the caller's

    def export(self, array: object) -> tuple[Memory, int]:
        driver, pointer = self._driver, array_pointer(array)
        kind = self._attribute("MEMORY_TYPE", pointer)
        if self._attribute("IS_MANAGED", pointer):
            raise NotExportable(f"managed (unified) memory has no IPC handle: {_CREATE}")
        if kind != int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            raise NotExportable(f"this is not GPU memory, but the host's: {_CREATE}")
        device = self._attribute("DEVICE_ORDINAL", pointer) or 0
        if not self._attribute("IS_LEGACY_CUDA_IPC_CAPABLE", pointer):
            if self._attribute("MEMPOOL_HANDLE", pointer):
                why = "it comes from a stream-ordered pool (cudaMallocAsync)"
            else:
                why = (
                    "it was opened from another process, or is mapped by the virtual memory calls (torch's "
                    "expandable_segments, say)"
                )
            raise NotExportable(f"this memory has no IPC handle, because {why}: {_CREATE}")
        with self._devices.using(device):
            base, size = check(driver.cuMemGetAddressRange(pointer), "cuMemGetAddressRange")
            status, made = driver.cuIpcGetMemHandle(base)
        if status in (INVALID_VALUE, INVALID_HANDLE, INVALID_CONTEXT):
            raise NotExportable(f"memory that was opened from another process cannot be shared on: {_CREATE}")
        handle = handle_bytes(check((status, made), "cuIpcGetMemHandle"))
        with self._lock:
            kept = self._own.get(handle)
            if kept is None:
                kept = self._own[handle] = _Kept("exported", device, int(base), int(size), handle)
            else:
                kept.users += 1
            kept.things.append(array)
        return Memory(device, kept.pointer, kept.nbytes, handle, True, kept), pointer - kept.pointer

    def _attribute(self, name: str, pointer: int) -> int | None:
        which = getattr(self._driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        status, value = self._driver.cuPointerGetAttribute(which, pointer)
        if status == INVALID_VALUE:
            return None  # memory that CUDA does not know: plain host memory
        if status:
            fail(status, "cuPointerGetAttribute")
        return int(value)


def array_pointer(array: object) -> int:
    """The address of an array's first byte: CuPy's, torch's, or whatever has ``__cuda_array_interface__``."""
    if hasattr(array, "data_ptr"):  # torch, whose bfloat16 tensors have no __cuda_array_interface__
        return int(array.data_ptr())
    try:
        interface = array.__cuda_array_interface__  # type: ignore[attr-defined]
    except (AttributeError, TypeError) as error:
        raise NotExportable(f"a {type(array).__name__} is no array on a GPU ({error}): {_CREATE}") from None
    return int(interface["data"][0])


class Anchor:
    """What CuPy keeps in the place of `keep` with every array over some memory."""

    def __init__(self, keep: object) -> None:
        self.keep = keep


def view(memory: Memory, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None) -> Any:
    """A CuPy array over `memory`, which it keeps mapped."""
    module = cupy()
    kind = numpy_dtype(dtype)
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides else _count(shape) * itemsize(dtype)
    if offset < 0 or (last and offset + last > memory.nbytes):
        raise InvalidArgument(f"an array of {last} bytes at {offset} does not fit in {memory.nbytes} bytes")
    whole = module.cuda.UnownedMemory(memory.pointer, memory.nbytes, memory.keep, memory.device)
    try:
        return module.ndarray(shape, kind, memptr=module.cuda.MemoryPointer(whole, offset), strides=strides)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"CuPy {module.__version__} makes no array of {dtype}: {error}") from None


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def loaded(name: str) -> Any:
    """A module that the caller has imported, or None: never imported on their behalf."""
    return sys.modules.get(name)
