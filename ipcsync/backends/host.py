"""The CPU as a device: streams are threads, events are files of words with futexes, device memory is shared memory.

The default stream is the calling thread itself (None): work and waits on it happen at once. A stream of its own is a
daemon thread with a queue, on which calls, records and waits are in order, as on a GPU.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import linux, runtime
from ..errors import InvalidArgument, InvalidState, NotExportable, StreamFailed
from ..ledger import FOREVER
from ..shm import Region
from ..waiting import SLICE
from .base import Backend, Memory, RawEvent, RawStream
from .host_events import HostEvent


class HostStream:
    """A daemon thread and its queue."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[..., Any], tuple[Any, ...], Callable[[BaseException], None] | None]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._stop = False
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name="ipcsync-stream", daemon=True).start()

    def put(
        self, fn: Callable[..., Any], args: tuple[Any, ...], failed: Callable[[BaseException], None] | None = None
    ) -> None:
        with self._changed:
            if self._stop:
                raise InvalidState("this stream was closed")
            self._queue.append((fn, args, failed))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if not self._queue:
                    self._changed.notify_all()
                    while not self._queue:
                        if self._stop:
                            return
                        self._changed.wait()
                fn, args, failed = self._queue.popleft()
                self._busy = True
            if self.error is not None:
                if failed is not None:
                    failed(self.error)
                continue
            try:
                fn(*args)
            except BaseException as error:
                self.error = error

    def idle(self) -> bool:
        with self._changed:
            return not self._queue and not self._busy

    def check(self) -> None:
        if self.error is not None:
            raise StreamFailed(
                f"a call enqueued on this stream raised {self.error!r}: it takes no more work"
            ) from self.error

    def synchronize(self) -> None:
        with self._changed:
            while self._queue or self._busy:
                self._changed.wait(SLICE)
        self.check()

    def close(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()


def _store(region: Region, index: int, value: int, verdict: int | None) -> None:
    words = region.words
    if verdict is not None and words[verdict] <= value:
        value = FOREVER
    words[index] = value
    linux.futex_wake(region.address + 8 * index)


def _await(region: Region, index: int, value: int) -> None:
    words, address = region.words, region.address + 8 * index
    while (seen := words[index]) < value:
        linux.futex_wait(address, seen, SLICE)


class HostBackend(Backend):
    device_type = "cpu"
    device_writes = False

    def __init__(self) -> None:
        self._opened: dict[tuple[bytes, bool], tuple[Memory, int]] = {}
        self._lock = threading.Lock()

    # -- devices

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        yield

    def uuid(self, device: int) -> str:
        return "cpu"

    def index(self, uuid: str) -> int:
        return 0

    # -- streams

    def new_stream(self, device: int, priority: int) -> RawStream:
        return HostStream()

    def drop_stream(self, raw: RawStream) -> None:
        if raw is not None:
            raw.close()

    def current_stream(self, device: int) -> RawStream:
        return None

    def foreign_stream(self, stream: object) -> tuple[RawStream, int] | None:
        return (stream, 0) if isinstance(stream, HostStream) else None

    @contextmanager
    def using_stream(self, raw: RawStream, device: int) -> Iterator[None]:
        yield

    def stream_key(self, raw: RawStream) -> Hashable:
        return threading.get_ident() if raw is None else raw

    def is_thread(self, raw: RawStream) -> bool:
        return raw is None

    def stream_query(self, raw: RawStream) -> bool:
        if raw is None:
            return True
        raw.check()
        return bool(raw.idle())

    def stream_synchronize(self, raw: RawStream) -> None:
        if raw is not None:
            raw.synchronize()

    def call(self, raw: RawStream, device: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if raw is None:
            fn(*args)
        else:
            raw.check()
            raw.put(fn, args)

    # -- events

    def event_create(self, device: int, *, timing: bool, blocking: bool, interprocess: bool) -> RawEvent:
        return HostEvent.create(timing=timing)

    def event_record(self, event: RawEvent, raw: RawStream) -> None:
        ticket = event.begin()
        if raw is None:
            event.complete(ticket)
        else:
            raw.check()
            raw.put(event.complete, (ticket,), lambda error: event.condemn(ticket))

    def event_wait(self, event: RawEvent, raw: RawStream) -> None:
        ticket = event.issued
        if event.done(ticket):
            return
        if raw is None:
            event.wait(ticket)
        else:
            raw.check()
            raw.put(event.wait, (ticket,))

    def event_query(self, event: RawEvent) -> bool:
        return bool(event.done(event.issued))

    def event_synchronize(self, event: RawEvent) -> None:
        event.wait(event.issued)

    def event_elapsed(self, start: RawEvent, end: RawEvent) -> float:
        return float(end.finished_at() - start.finished_at()) / 1e6

    def event_export(self, event: RawEvent) -> bytes:
        return bytes(event.handle())

    def event_open(self, device: int, handle: bytes) -> RawEvent:
        return HostEvent.open(handle)

    def event_destroy(self, event: RawEvent) -> None:
        event.close()

    # -- words

    def register(self, region: Region) -> None:
        pass

    def unregister(self, region: Region) -> None:
        pass

    def write(
        self,
        raw: RawStream,
        region: Region,
        index: int,
        value: int,
        *,
        verdict: int | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        if raw is None:
            _store(region, index, value, verdict)
        else:
            raw.put(_store, (region, index, value, verdict), failed)

    def wait(self, raw: RawStream, region: Region, index: int, value: int) -> None:
        if raw is None:
            _await(region, index, value)
        else:
            raw.check()
            raw.put(_await, (region, index, value))

    # -- memory

    def allocate(self, device: int, nbytes: int, name: str) -> Memory:
        path = runtime.default_directory() / name
        region = Region.create(path, max(1, nbytes))
        return Memory(0, region.address, nbytes, name.encode(), keep=region)

    def open_memory(self, device: int, handle: bytes, nbytes: int, *, writable: bool) -> Memory:
        key = (handle, writable)
        with self._lock:
            memory, count = self._opened.get(key, (None, 0))
            if memory is None:
                path = runtime.default_directory() / handle.decode()
                region = Region.open(path, writable=writable)
                memory = Memory(0, region.address, nbytes, handle, writable, region)
            self._opened[key] = (memory, count + 1)
            return memory

    def free(self, memory: Memory) -> None:
        key = (memory.handle, memory.writable)
        with self._lock:
            opened, count = self._opened.get(key, (None, 0))
            if opened is memory and count > 1:
                self._opened[key] = (opened, count - 1)
                return
            if opened is memory:
                del self._opened[key]
            elif isinstance(memory.keep, Region):
                memory.keep.path.unlink(missing_ok=True)
        if memory.keep is not None:
            memory.keep.close()

    def export(self, array: object) -> tuple[Memory, int]:
        import numpy

        if not isinstance(array, numpy.ndarray):
            raise InvalidArgument(f"{type(array).__name__} is no array of the CPU: pass numpy arrays")
        low, high = numpy.lib.array_utils.byte_bounds(array)
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, offset, _, inode, *name = line.split(maxsplit=5)
            begin, end = (int(x, 16) for x in span.split("-"))
            if begin <= low and high <= end:
                path = Path(name[0]) if name else None
                if "s" not in mode or path is None or not path.exists() or not linux.is_tmpfs(path):
                    break
                if path.stat().st_ino != int(inode):
                    break
                return Memory(0, begin - int(offset, 16), path.stat().st_size, os.fsencode(path)), low - begin + int(
                    offset, 16
                )
        raise NotExportable(
            "this array's memory is private to this process: only memory that maps a file of a tmpfs can be shared; "
            "have the broker own it with session.create_array(name, fields), and write into that"
        )

    def array(
        self, memory: Memory, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Any:
        import numpy

        from ..dtypes import numpy_dtype

        buffer: mmap.mmap | memoryview = memory.keep.bytes
        array = numpy.ndarray(shape, numpy_dtype(dtype), buffer=buffer, offset=offset, strides=strides)
        if not memory.writable:
            array.flags.writeable = False
        return array
