"""The CPU as a device: streams are threads, events are files of words with futexes, device memory is shared memory.

The default stream is the calling thread itself (None): work and waits on it happen at once. A stream of its own is a
daemon thread with a queue, on which calls, records and waits are in order, as on a GPU.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import bells, linux, runtime
from ..errors import InvalidArgument, InvalidState, NotExportable, ResourceLost
from ..ledger import FOREVER
from ..shm import Region
from ..waiting import SLICE
from .base import Backend, Memory, RawEvent, RawStream
from .host_events import HostEvent
from .host_stream import HostStream


def _store(region: Region, index: int, value: int, verdict: int | None) -> None:
    words = region.words
    if verdict is None or words[index] != FOREVER:  # a forced release stays
        words[index] = value
    bell = region.bell_of(index)
    if bell is None:
        linux.futex_wake(region.address + 8 * index)
    else:
        bells.ring(region, bell)


def _await(region: Region, index: int, value: int) -> None:
    words, bell = region.words, region.bell_of(index)
    while (seen := words[index]) < value:
        if bell is None:
            linux.futex_wait(region.address + 8 * index, seen, SLICE)
        else:
            token = bells.announce(region, bell)
            if words[index] < value:
                bells.sleep(region, bell, token, SLICE)


class _Whole:
    """In the place of a region: all of it as one array, which is the base of every array over it."""

    def __init__(self, whole: Any) -> None:
        self.bytes = whole


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
        pass  # its thread ends with the last reference to it

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
        return HostEvent.create(interprocess=interprocess)

    def event_record(self, event: RawEvent, raw: RawStream) -> None:
        if raw is not None:
            raw.check()
        event.record(raw)

    def event_wait(self, event: RawEvent, raw: RawStream) -> None:
        ticket = event.latest
        if raw is None:
            event.wait(ticket)
        else:
            raw.check()
            if not event.done(ticket):
                raw.put(event.wait, (ticket,))

    def event_query(self, event: RawEvent) -> bool:
        return bool(event.query())

    def event_synchronize(self, event: RawEvent) -> None:
        event.wait(event.latest)

    def event_elapsed(self, start: RawEvent, end: RawEvent) -> float:
        times = []
        for event, what in ((start, "start"), (end, "end")):
            number, lane = event.latest
            if number == 0:
                raise InvalidState(f"elapsed_time needs both events recorded, and the {what} is not")
            if not event.done((number, lane)):
                raise InvalidState(f"elapsed_time needs both events complete: synchronize() the {what} first")
            times.append(event.finished[1])
        return float(times[1] - times[0]) / 1e6

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

    def passed(self, raw: RawStream) -> Callable[[], bool]:
        if raw is None:
            return lambda: True
        reached = threading.Event()
        raw.put(reached.set, (), lambda _: reached.set())
        return reached.is_set

    # -- memory

    def allocate(self, device: int, nbytes: int, name: str) -> Memory:
        path = runtime.default_directory() / name
        region = Region.create(path, max(1, nbytes))
        return Memory(0, region.address, nbytes, os.fsencode(path.name), keep=region)

    def located(self, handle: bytes, directory: Path) -> bytes:
        return os.fsencode(directory / os.fsdecode(handle))

    def open_memory(self, device: int, handle: bytes, nbytes: int, *, writable: bool) -> Memory:
        key = (handle, writable)
        with self._lock:
            memory, count = self._opened.get(key, (None, 0))
            if memory is None:
                path = runtime.default_directory() / os.fsdecode(handle)
                region = Region.open(path, writable=writable)
                if region.nbytes < nbytes:  # what lies behind its end is a SIGBUS
                    region.close()
                    raise ResourceLost(f"{path} was cut short: create what it belongs to anew")
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

    def anchored(self, memory: Memory) -> tuple[Memory, object]:
        import numpy

        whole = numpy.frombuffer(memory.keep.bytes, numpy.uint8)
        return dataclasses.replace(memory, keep=_Whole(whole)), whole

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
