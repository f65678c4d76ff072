"""The cuda backend: events, streams and memory of NVIDIA GPUs, and words that streams write and wait for.

A raw stream is a ``CUstream`` as an int, a raw event a :class:`CudaEvent`. Words are reached by stream memory
operations (``cuStreamWriteValue64``, ``cuStreamWaitValue64``) on host pages registered with CUDA, where a live probe
shows that they work. No call makes Python run on a CUDA thread.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from ..errors import (
    AmbiguousStream,
    CaptureUnsupported,
    HandleInvalid,
    InvalidState,
    IpcSyncError,
    NotExportable,
    Unsupported,
)
from ..shm import Region
from . import cuda_memory, cuda_probe, cuda_streams
from .base import Backend, Memory
from .cuda_driver import (
    ALREADY_REGISTERED,
    CAPTURE,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    MAP_FAILED,
    NOT_READY,
    OUT_OF_MEMORY,
    Devices,
    check,
    fail,
    find_uuid,
    load,
)
from .cuda_events import CudaEvent, too_many
from .cuda_pending import Passed, Pending
from .cuda_streams import DefaultStream
from .cuda_teardown import Quarantine

_BATCH = 128  # the driver takes 256 operations at most


class _Registration:
    """A region the device reaches. It holds the mapping: pages must not go, or be mapped anew, while registered."""

    def __init__(self, region: Region, device: int, *, ours: bool) -> None:
        self.device, self.ours, self.users, self.mapping = device, ours, 1, memoryview(region.bytes)


class CudaBackend(Backend):
    device_type: ClassVar[str] = "cuda"
    device_writes: ClassVar[bool] = True

    def __init__(self) -> None:
        self._driver = load()
        self._write64, self._wait64 = self._driver.cuStreamWriteValue64, self._driver.cuStreamWaitValue64
        self._capturing = self._driver.cuStreamIsCapturing
        self._record_event, self._wait_event = self._driver.cuEventRecord, self._driver.cuStreamWaitEvent
        self._devices = Devices(self._driver)
        self._quarantine = Quarantine()
        self._streams = cuda_streams.Streams(self._driver, self._devices)
        self._memories = cuda_memory.Memories(self._driver, self._devices, self._end)
        self._handles: dict[int, Any] = {}  # by raw stream
        self._pending = Pending(self._finished)
        self._spare: list[list[Any]] = []
        self._registered: dict[int, _Registration] = {}  # by address
        self._refused: dict[int, str] = {}  # by device: why memory operations do not work
        self._prober = cuda_probe.Prober(self._driver, self._devices)
        self._queues: dict[int, int] = {}
        self._lock = threading.RLock()

    # -- devices

    def device_count(self) -> int:
        return self._devices.count

    def current_device(self) -> int:
        return 0 if self._devices.count == 1 else self._devices.current()

    def using(self, device: int) -> AbstractContextManager[None]:
        return self._devices.using(device)

    def uuid(self, device: int) -> str:
        self._devices.handle(device)
        return self._devices.uuids()[device]

    def index(self, uuid: str) -> int:
        return find_uuid(uuid, self._devices.uuids())

    # -- streams

    def new_stream(self, device: int, priority: int) -> int:
        """Non-blocking, as torch's are: the null stream does not wait for it. CUDA clamps the priority."""
        with self.using(device):
            made = check(self._driver.cuStreamCreateWithPriority(1, priority), "cuStreamCreateWithPriority")
        return cuda_streams.KeptStream(int(made), cuda_streams.OwnStream(self._driver, made), device)

    def drop_stream(self, raw: int) -> None:
        """Nothing: it goes when the last slot, timeline or budget that keeps its raw value lets go."""

    def framework_streams(self, device: int) -> dict[str, int]:
        """The current stream of "cupy" and "torch", of those that are loaded."""
        return self._streams.of_frameworks(device)

    def current_stream(self, device: int) -> int:
        found = self.framework_streams(device)
        if len(found) > 1 and len({self.stream_key(raw) for raw in found.values()}) > 1:
            raise AmbiguousStream(
                "torch's current stream and CuPy's differ, and no stream was named: pass stream=, enter a stream of "
                'ours, or say connect(streams="torch") or connect(streams="cupy")'
            )
        return next(iter(found.values())) if found else self._streams.default(cuda_streams.LEGACY, device)

    def foreign_stream(self, stream: object) -> tuple[int, int] | None:
        return self._streams.foreign(stream)

    def using_stream(self, raw: int, device: int) -> AbstractContextManager[None]:
        return self._streams.as_current(raw, device)

    def stream_device(self, raw: int) -> int:
        device = getattr(raw, "device", None)
        return self._streams.device_of(int(raw)) if device is None else device

    def stream_key(self, raw: int) -> Hashable:
        return raw if raw.__class__ is not DefaultStream else cuda_streams.key(raw)

    def stream_query(self, raw: int) -> bool:
        return self._ready(self._on(raw, self._driver.cuStreamQuery, raw), "cuStreamQuery")

    def stream_synchronize(self, raw: int) -> None:
        self._until(lambda: self.stream_query(raw))

    def call(self, raw: int, device: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with self.using_stream(raw, device):
            fn(*args)

    def _handle(self, raw: int) -> Any:
        """The driver's own object for a stream: made once, because each conversion of an int costs a call 0.1 us."""
        if len(self._handles) > 1024:  # streams come and go
            self._handles.clear()
        pointer = int(raw)
        made = self._handles[pointer] = self._driver.CUstream(pointer)
        return made

    def _on(self, raw: int, call: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        """The status of a call on a stream. A default stream is the current device's; others know their own."""
        if raw.__class__ is not DefaultStream:
            return call(*args)[0]
        if self._devices.count == 1:  # whatever context the thread has is the right one, if it has one
            status = call(*args)[0]
            if status != INVALID_CONTEXT:
                return status
        with self.using(raw.device):
            return call(*args)[0]

    def _not_capturing(self, stream: Any) -> None:
        status, capturing = self._capturing(stream)
        if capturing:
            raise CaptureUnsupported(CAPTURE)
        if status and status != INVALID_CONTEXT:  # a thread without a context: the call itself will see to one
            fail(status, "cuStreamIsCapturing")

    def _ready(self, status: Any, call: str) -> bool:
        if not status:
            return True
        if status != NOT_READY:  # an error must not read as "not done" for ever
            fail(status, call)
        return False

    def _until(self, done: Callable[[], bool]) -> None:
        """Polls, so that Ctrl-C comes through and a dead peer's work cannot hold the thread inside the driver."""
        spin_until = time.monotonic() + 0.001
        nap = 20e-6
        while not done():
            if time.monotonic() > spin_until:
                time.sleep(nap)
                nap = min(nap * 1.5, 1e-3)

    # -- events

    def event_create(self, device: int, *, timing: bool, blocking: bool, interprocess: bool) -> CudaEvent:
        flags = (0 if timing else 2) | (1 if blocking else 0) | (4 if interprocess else 0)
        with self.using(device):
            status, handle = self._driver.cuEventCreate(flags)
        if status == OUT_OF_MEMORY and interprocess:
            raise too_many()
        return CudaEvent(check((status, handle), "cuEventCreate"), device, interprocess=interprocess, opened=False)

    def event_record(self, event: CudaEvent, raw: int) -> None:
        stream = self._handles.get(raw) or self._handle(raw)
        self._not_capturing(stream)
        self._must(self._on(raw, self._record_event, event.handle, stream), "cuEventRecord")

    def event_wait(self, event: CudaEvent, raw: int) -> None:
        stream = self._handles.get(raw) or self._handle(raw)
        self._not_capturing(stream)
        self._must(self._on(raw, self._wait_event, stream, event.handle, 0), "cuStreamWaitEvent")
        if event.interprocess:  # who records it may be another process, or dead
            self._pending.add_event(event)

    def event_query(self, event: CudaEvent) -> bool:
        (status,) = self._driver.cuEventQuery(event.handle)
        if status == INVALID_CONTEXT:
            with self.using(event.device):
                (status,) = self._driver.cuEventQuery(event.handle)
        return self._ready(status, "cuEventQuery")

    def event_synchronize(self, event: CudaEvent) -> None:
        self._until(lambda: self.event_query(event))

    def event_elapsed(self, start: CudaEvent, end: CudaEvent) -> float:
        with self.using(end.device):
            status, milliseconds = self._driver.cuEventElapsedTime(start.handle, end.handle)
        if status == NOT_READY:
            raise InvalidState("elapsed_time needs both events complete: synchronize() the end first")
        if status == INVALID_HANDLE:
            raise InvalidState("elapsed_time needs both events recorded, and made with enable_timing=True")
        return float(check((status, milliseconds), "cuEventElapsedTime"))

    def event_export(self, event: CudaEvent) -> bytes:
        if event.opened or not event.interprocess:
            what = "was itself opened from a handle" if event.opened else "was not made with interprocess=True"
            raise NotExportable(f"this event {what}: only the process that made an interprocess event exports it")
        with self.using(event.device):
            return cuda_memory.handle_bytes(
                check(self._driver.cuIpcGetEventHandle(event.handle), "cuIpcGetEventHandle")
            )

    def event_open(self, device: int, handle: bytes) -> CudaEvent:
        filled = cuda_memory.fill_handle(self._driver.CUipcEventHandle(), handle)
        with self.using(device):
            status, opened = self._driver.cuIpcOpenEventHandle(filled)
        if status in (INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, MAP_FAILED, 304):
            raise HandleInvalid(
                "these 64 bytes open no CUDA event here: they are no handle, or their process is gone, or is this one",
                status=int(status),
            )
        if status == OUT_OF_MEMORY:
            raise too_many()
        return CudaEvent(check((status, opened), "cuIpcOpenEventHandle"), device, interprocess=True, opened=True)

    def event_destroy(self, event: CudaEvent) -> None:
        def work() -> None:
            if event.interprocess:
                self._pending.forget_event(event)
            with self.using(event.device):
                self._driver.cuEventDestroy(event.handle)

        if event.interprocess:
            # A queued wait or record of it, here or in a peer, must find it alive.
            self._quarantine.end(work, ready=lambda: self._finished(event))
        else:
            work()

    def _finished(self, event: CudaEvent) -> bool:
        try:
            with self.using(event.device):
                return bool(self._driver.cuEventQuery(event.handle)[0] != NOT_READY)
        except IpcSyncError:
            return True  # the context is lost: nothing runs any more

    def _must(self, status: Any, call: str) -> None:
        if status:
            fail(status, call)

    # -- words

    def memory_operations(self, device: int) -> bool:
        """Whether streams can write and wait for words here: a real write and wait, tried once a process."""
        if device not in self._refused:
            with self._lock:
                if device not in self._refused:
                    self._refused[device] = self._prober.memory_operations(device)
        return not self._refused[device]

    def register(self, region: Region) -> None:
        with self._lock:
            found = self._registered.get(region.address)
            if found is not None:
                found.users += 1
                return
            device = self._devices.touched()
            if not self.memory_operations(device):
                raise Unsupported(
                    f"streams cannot wait for words of memory on cuda:{device}: {self._refused[device]}; "
                    "`ipcsync doctor` tries it too"
                )
            self.blocked_limit(device)  # probed before anything waits
            driver = self._driver
            flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
            if not region.writable:
                flags |= driver.CU_MEMHOSTREGISTER_READ_ONLY
            with self.using(device):
                (status,) = driver.cuMemHostRegister(region.address, region.nbytes, flags)
                if status == INVALID_VALUE:
                    raise Unsupported(
                        f"CUDA does not take {region.path} as device-visible memory: the runtime directory must be on "
                        "tmpfs (/dev/shm); `ipcsync doctor` looks at it"
                    )
                if status != ALREADY_REGISTERED:
                    self._must(status, "cuMemHostRegister")
                there = check(driver.cuMemHostGetDevicePointer(region.address, 0), "cuMemHostGetDevicePointer")
                if int(there) != region.address:
                    driver.cuMemHostUnregister(region.address)
                    raise Unsupported("this GPU has no unified addressing, which shared events on cuda need")
            self._registered[region.address] = _Registration(region, device, ours=status != ALREADY_REGISTERED)

    def _end(self, work: Callable[[], object]) -> None:
        self._quarantine.end(work, ready=self._pending.none, moment=1.0)

    def unregister(self, region: Region) -> None:
        with self._lock:
            found = self._registered.get(region.address)
            if found is None:
                return
            found.users -= 1
            if found.users:
                return
            del self._registered[region.address]
        address = region.address

        def work() -> None:
            if found.ours:
                with self.using(found.device):
                    self._driver.cuMemHostUnregister(address)
            found.mapping.release()

        self._end(work)

    def write(
        self,
        raw: int,
        region: Region,
        index: int,
        value: int,
        *,
        verdict: int | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`verdict` and `failed` are the host's: a stream here runs on, or its whole context is lost."""
        stream = self._handles.get(raw) or self._handle(raw)
        status, capturing = self._capturing(stream)
        if status or capturing:
            self._not_capturing(stream)
        address = region.address + 8 * index
        if raw.__class__ is not DefaultStream:
            (status,) = self._write64(stream, address, value, 0)
        else:
            status = self._on(raw, self._write64, stream, address, value, 0)
        if status:
            fail(status, "cuStreamWriteValue64")

    def wait(self, raw: int, region: Region, index: int, value: int) -> None:
        stream = self._handles.get(raw) or self._handle(raw)
        status, capturing = self._capturing(stream)
        if status or capturing:
            self._not_capturing(stream)
        address = region.address + 8 * index
        if raw.__class__ is not DefaultStream:
            (status,) = self._wait64(stream, address, value, 0)  # flags 0: GEQ, cyclically
        else:
            status = self._on(raw, self._wait64, stream, address, value, 0)
        if status:
            fail(status, "cuStreamWaitValue64")
        self._pending.add(region.words, index, value)

    def wait_for_all(self, raw: int, region: Region, waits: Sequence[tuple[int, int]]) -> None:
        """Two waits one by one cost the host 3.2 us, in one call 2.4; four 6.0 and 3.0 (docs/benchmarks.md)."""
        if len(waits) == 1:
            self.wait(raw, region, *waits[0])
            return
        stream = self._handles.get(raw) or self._handle(raw)
        self._not_capturing(stream)
        for start in range(0, len(waits), _BATCH):
            part = waits[start : start + _BATCH]
            operations = self._operations(len(part))
            for operation, (index, value) in zip(operations, part, strict=True):
                operation.waitValue.address, operation.waitValue.value64 = region.address + 8 * index, value
            status = self._on(raw, self._driver.cuStreamBatchMemOp, stream, len(part), operations, 0)
            self._must(status, "cuStreamBatchMemOp")
            self._spare.append(operations)
            for index, value in part:
                self._pending.add(region.words, index, value)

    def _operations(self, count: int) -> list[Any]:
        """As many waits of a batch, to be filled in; those of an earlier batch if there are, as making one costs."""
        try:
            operations = self._spare.pop()
        except IndexError:
            operations = []
        driver = self._driver
        while len(operations) < count:
            made = driver.CUstreamBatchMemOpParams()
            made.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64
            made.waitValue.flags = 0  # GEQ, cyclically
            operations.append(made)
        return operations[:count]

    def passed(self, raw: int) -> Callable[[], bool]:
        return Passed(self, raw)

    def blocked_limit(self, device: int) -> int:
        """Hardware queues, less a quarter (docs/decisions/0017). A stream with new work takes an idle queue, but shares
        one when none is idle, and may then stand behind a blocked stream for as long as that waits: with C - 1 blocked,
        one at a time goes on and two at once may not."""
        queues = self._queues.get(device)
        if queues is None:
            with self._lock:
                queues = self._queues.get(device)
                if queues is None:
                    queues = self._prober.hardware_queues(device)
                    self._queues[device] = queues
        return queues - max(1, queues // 4)

    # -- memory

    def allocate(self, device: int, nbytes: int, name: str) -> Memory:
        return self._memories.allocate(device, nbytes)

    def open_memory(self, device: int, handle: bytes, nbytes: int, *, writable: bool) -> Memory:
        return self._memories.open(device, handle, nbytes, writable)

    def free(self, memory: Memory) -> None:
        self._memories.free(memory)

    def export(self, array: object) -> tuple[Memory, int]:
        return self._memories.export(array)

    def anchored(self, memory: Memory) -> tuple[Memory, object]:
        anchor = cuda_memory.Anchor(memory.keep)
        return dataclasses.replace(memory, keep=anchor), anchor

    def array(
        self, memory: Memory, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Any:
        return cuda_memory.view(memory, offset, shape, dtype, strides)
