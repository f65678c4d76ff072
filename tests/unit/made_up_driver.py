"""A CUDA driver of Python, for the backend's own logic: two devices, streams that wait for words and events.

A thread takes the streams on, and so does whoever asks about one. While as many streams wait as there are queues, no
other goes on. It knows only what the backend calls, and raises where CUDA would crash (on what was destroyed) or hang.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NOT_READY = 600


class Handle(int):
    """A CUevent, CUstream or context: an int that is itself."""


class Uuid:
    def __init__(self, index: int) -> None:
        self.bytes = bytes([index] * 16)


class IpcHandle:
    def __init__(self, raw: bytes = bytes(64)) -> None:
        self._buffer = ctypes.create_string_buffer(raw, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._buffer)

    def raw(self) -> bytes:
        return self._buffer.raw


class Wait:
    """A step that a stream stands at until it is over."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self.over = over


class Event:
    def __init__(self, context: int) -> None:
        self.context, self.pending = context, 0  # records that no stream has reached yet


class MadeUpDriver:
    CUstream = staticmethod(lambda pointer: Handle(pointer))
    CUipcEventHandle = CUipcMemHandle = IpcHandle
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MPS_ENABLED="mps")
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_READ_ONLY = 1, 2, 4
    CUstreamBatchMemOpType = SimpleNamespace(CU_STREAM_MEM_OP_WAIT_VALUE_64=4)
    CUstreamBatchMemOpParams = staticmethod(lambda: SimpleNamespace(waitValue=SimpleNamespace()))
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)

    def __init__(self, devices: int = 2, queues: int = 8) -> None:
        self.devices, self.queues = devices, queues
        self.streams: dict[int, deque[Any]] = {1: deque()}  # the null stream, of the first device only
        self.of_stream: dict[int, int] = {1: 100}
        self.contexts_of = {1: 100}  # also of streams that were destroyed
        self.events: dict[int, Event] = {}
        self.memory: dict[int, int] = {}  # address -> context
        self.registered: set[int] = set()
        self.foreign: dict[bytes, int] = {}  # handles of "another process": event addresses
        self.contexts = threading.local()
        self._next = itertools.count(0x1000, 0x100)
        self._lock = threading.RLock()
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(0.0005):
            self._go_on()

    def stop(self) -> None:
        self._over.set()

    # -- devices and contexts

    def cuDeviceGetCount(self) -> Any:
        return 0, self.devices

    def cuDeviceGet(self, index: int) -> Any:
        return 0, index

    def cuDeviceGetUuid(self, device: int) -> Any:
        return 0, Uuid(device)

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return 0, b"Made up"

    def cuDeviceGetAttribute(self, which: str, device: int) -> Any:
        return 0, 0

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return 0, Handle(100 + device)

    def _stack(self) -> list[int]:
        if not hasattr(self.contexts, "stack"):
            self.contexts.stack = []
        found: list[int] = self.contexts.stack
        return found

    def cuCtxPushCurrent(self, context: int) -> Any:
        self._stack().append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> Any:
        return 0, self._stack().pop()

    def cuCtxGetCurrent(self) -> Any:
        return 0, Handle(self._stack()[-1] if self._stack() else 0)

    def cuCtxGetDevice(self) -> Any:
        return 0, self._stack()[-1] - 100

    def _context(self) -> int:
        assert self._stack(), "a call that needs a context was made without one"
        return self._stack()[-1]

    # -- streams

    def cuStreamCreate(self, flags: int) -> Any:
        return self.cuStreamCreateWithPriority(flags, 0)

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        made = Handle(next(self._next))
        self.contexts_of[made] = self.of_stream[made] = self._context()
        with self._lock:
            self.streams[made] = deque()
        return 0, made

    def cuStreamDestroy(self, stream: int) -> Any:
        self._go_on()
        del self.of_stream[stream]  # what is enqueued still runs
        return (0,)

    def cuStreamIsCapturing(self, stream: int) -> Any:
        assert stream in self.of_stream, "a stream that was destroyed: a crash"
        return 0, 0

    def cuStreamGetCtx(self, stream: int) -> Any:
        return 0, Handle(self.of_stream[stream])

    def cuStreamQuery(self, stream: int) -> Any:
        assert stream in self.of_stream, "a stream that was destroyed: a crash"
        self._go_on()
        return (NOT_READY if self.streams[stream] else 0,)

    def cuStreamSynchronize(self, stream: int) -> Any:
        while self.cuStreamQuery(stream)[0]:
            pass
        return (0,)

    def _go_on(self) -> int:
        """How many streams wait then."""
        with self._lock:
            moved = True
            while moved:
                moved, waiting = False, Counter[int]()
                for stream, queue in self.streams.items():
                    while queue and isinstance(queue[0], Wait) and queue[0].over():
                        queue.popleft()
                        moved = True
                    if queue and isinstance(queue[0], Wait):
                        waiting[self.contexts_of[stream]] += 1
                for stream, queue in self.streams.items():
                    while waiting[self.contexts_of[stream]] < self.queues and queue and not isinstance(queue[0], Wait):
                        queue.popleft()()
                        moved = True
            return waiting.total()

    def _enqueue(self, stream: int, step: Any) -> Any:
        assert stream in self.of_stream, "a stream that was destroyed: a crash"
        with self._lock:
            self.streams[stream].append(step)
            self._go_on()
        return (0,)

    # -- words

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> Any:
        def step() -> None:
            ctypes.c_uint64.from_address(address).value = value

        return self._enqueue(stream, step)

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> Any:
        return self._enqueue(stream, Wait(lambda: ctypes.c_uint64.from_address(address).value >= value))

    def cuStreamBatchMemOp(self, stream: int, count: int, operations: list[Any], flags: int) -> Any:
        assert count == len(operations) <= 256
        for each in [one.waitValue for one in operations]:
            assert each.operation == 4
            self.cuStreamWaitValue64(stream, each.address, each.value64, each.flags)
        return (0,)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        assert flags & self.CU_MEMHOSTREGISTER_PORTABLE, "only the current device would reach it"
        self.registered.add(address)
        return (0,)

    def cuMemHostUnregister(self, address: int) -> Any:
        self._would_wait()
        self.registered.remove(address)
        return (0,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        return 0, address

    # -- events

    def cuEventCreate(self, flags: int) -> Any:
        made = Handle(next(self._next))
        self.events[made] = Event(self._context())
        return 0, made

    def cuEventDestroy(self, event: int) -> Any:
        del self.events[event]
        return (0,)

    def cuEventRecord(self, event: int, stream: int) -> Any:
        found = self.events[event]
        if stream in self.of_stream and self.of_stream[stream] != found.context:
            return (400,)  # of another device
        found.pending += 1

        def step() -> None:
            found.pending -= 1

        return self._enqueue(stream, step)

    def cuEventQuery(self, event: int) -> Any:
        self._go_on()
        return (NOT_READY if self.events[event].pending else 0,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        found = self.events[event]
        return self._enqueue(stream, Wait(lambda: not found.pending))

    def cuIpcGetEventHandle(self, event: int) -> Any:
        return 0, IpcHandle(b"event%d" % event)

    def cuIpcOpenEventHandle(self, handle: IpcHandle) -> Any:
        found = self.foreign.get(handle.raw())
        if found is None:
            return 205, None
        made = Handle(next(self._next))
        self.events[made] = self.events[found]
        return 0, made

    # -- memory

    def cuMemAlloc(self, nbytes: int) -> Any:
        made = next(self._next) << 24
        self.memory[made] = self._context()
        return 0, made

    def cuMemFree(self, pointer: int) -> Any:
        self._would_wait()
        del self.memory[pointer]
        return (0,)

    def cuMemsetD8Async(self, pointer: int, value: int, nbytes: int, stream: int) -> Any:
        return (0,)

    def cuIpcGetMemHandle(self, pointer: int) -> Any:
        return 0, IpcHandle(b"memory%d" % pointer)

    def _would_wait(self) -> None:
        assert not self._go_on(), "this call waits in the driver for a blocked stream, and holds every thread up"
