"""What a backend is: the few operations that everything above is written in.

Two implementations stand behind it, ``host`` and ``cuda``, and ``select.py`` is the one place that chooses. Layers 1 to
3 know streams and events only as *raw* values that they hand back to the backend that made them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..shm import Region

RawStream = Any  # cuda: the cudaStream_t as an int; host: a host stream, or None for the calling thread itself
RawEvent = Any


@dataclass(frozen=True)
class Memory:
    """Device memory that other processes can open.

    ``handle`` is what they open it by: on cuda the 64 bytes of cudaIpcGetMemHandle, on the host a file's name in the
    runtime directory, UTF-8. ``pointer`` is its address in this process, ``keep`` whatever must live as long.
    """

    device: int
    pointer: int
    nbytes: int
    handle: bytes
    writable: bool = True
    keep: Any = None


class Backend(ABC):
    """One kind of device. Every call works on any thread and leaves the caller's current device as it was."""

    device_type: ClassVar[str]  # "cpu" or "cuda": what a Device says
    device_writes: ClassVar[bool]  # words are written by a device, which cannot wake a futex: waiters poll

    # -- devices

    @abstractmethod
    def device_count(self) -> int: ...

    @abstractmethod
    def current_device(self) -> int: ...

    @abstractmethod
    def using(self, device: int) -> AbstractContextManager[None]:
        """Makes `device` current (its primary context on cuda) for the block, and restores the caller's."""

    @abstractmethod
    def uuid(self, device: int) -> str:
        """A name of the device that means the same in every process: "cpu", or "GPU-xxxxxxxx-...."."""

    @abstractmethod
    def index(self, uuid: str) -> int:
        """The ordinal of that device here; ``DeviceNotVisible`` when this process cannot see it."""

    # -- streams

    @abstractmethod
    def new_stream(self, device: int, priority: int) -> RawStream: ...

    @abstractmethod
    def drop_stream(self, raw: RawStream) -> None: ...

    @abstractmethod
    def current_stream(self, device: int) -> RawStream:
        """The stream that work goes to when nobody names one (outside ``with stream:``, which stream.py knows)."""

    def framework_streams(self, device: int) -> dict[str, RawStream]:
        """The current stream of each framework that is loaded, by its name: "torch", "cupy". None on the host."""
        return {}

    @abstractmethod
    def foreign_stream(self, stream: object) -> tuple[RawStream, int] | None:
        """(raw, device) of somebody else's stream object (CuPy's, torch's, ``__cuda_stream__``, an int), or None."""

    @abstractmethod
    def using_stream(self, raw: RawStream, device: int) -> AbstractContextManager[None]:
        """Makes the stream the framework's current one for the block (CuPy's; nothing on the host)."""

    def stream_device(self, raw: RawStream) -> int:
        """The ordinal of the device whose work the stream is; 0 on the host."""
        return 0

    @abstractmethod
    def stream_key(self, raw: RawStream) -> Hashable:
        """Equal for equal streams: the thread's identity where the stream is the calling thread."""

    def is_thread(self, raw: RawStream) -> bool:
        """Whether this stream is the calling thread itself, on which a wait happens at once."""
        return False

    @abstractmethod
    def stream_query(self, raw: RawStream) -> bool: ...

    @abstractmethod
    def stream_synchronize(self, raw: RawStream) -> None: ...

    @abstractmethod
    def call(self, raw: RawStream, device: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Puts work on the stream: host: `fn` runs on its thread, in order; cuda: at once, the stream current."""

    # -- events (Layer 1, and the CUDA event of a shared event)

    @abstractmethod
    def event_create(self, device: int, *, timing: bool, blocking: bool, interprocess: bool) -> RawEvent: ...

    @abstractmethod
    def event_record(self, event: RawEvent, raw: RawStream) -> None: ...

    @abstractmethod
    def event_wait(self, event: RawEvent, raw: RawStream) -> None: ...

    @abstractmethod
    def event_query(self, event: RawEvent) -> bool: ...

    @abstractmethod
    def event_synchronize(self, event: RawEvent) -> None: ...

    @abstractmethod
    def event_elapsed(self, start: RawEvent, end: RawEvent) -> float:
        """Milliseconds between two completed, timed events."""

    @abstractmethod
    def event_export(self, event: RawEvent) -> bytes:
        """Its 64 bytes."""

    @abstractmethod
    def event_open(self, device: int, handle: bytes) -> RawEvent: ...

    @abstractmethod
    def event_destroy(self, event: RawEvent) -> None:
        """Frees it once the work that uses it is done. Never blocks the caller for long."""

    # -- words of shared memory (Layers 2 and 3)

    @abstractmethod
    def register(self, region: Region) -> None:
        """Lets the device reach the region's words, once a process; nothing on the host."""

    @abstractmethod
    def unregister(self, region: Region) -> None: ...

    @abstractmethod
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
        """Stores `value` in word `index` when the stream gets there, and wakes whoever sleeps on it.

        On the host: where there is a `verdict` (the index of the word that says from which round on the timeline is
        condemned), a word that was released by force stays so. A condemned round is stored like any other and lets go
        nobody but its own waiters: those of later ones are the condemner's to release, once the chain is condemned to
        its end. And on a stream whose earlier call raised, `failed` is called with that error instead of the store.
        """

    @abstractmethod
    def wait(self, raw: RawStream, region: Region, index: int, value: int) -> None:
        """The stream goes on once word `index` is at least `value` (cyclically: GEQ). On the calling thread itself
        (host) this blocks; Layers 2 and 3 do not use it there."""

    def wait_for_all(self, raw: RawStream, region: Region, waits: Sequence[tuple[int, int]]) -> None:
        """:meth:`wait` for each (index, value); in one call where the device has one."""
        for index, value in waits:
            self.wait(raw, region, index, value)

    def passed(self, raw: RawStream) -> Callable[[], bool]:
        """What tells, from now on, whether the stream has done all it was given till now. The stream may end before."""
        return lambda: True

    def blocked_limit(self, device: int) -> int | None:
        """How many streams of this process may be blocked on words at once: its hardware queues, less a reserve
        (docs/decisions/0017). None: no limit."""
        return None

    # -- memory

    @abstractmethod
    def allocate(self, device: int, nbytes: int, name: str) -> Memory:
        """Zeroed memory that others can open; ``OutOfSpace`` when there is none. `name` is the file's on the host: in
        the process's runtime directory, or an absolute path."""

    def located(self, handle: bytes, directory: Path) -> bytes:
        """The handle as `open_memory` takes it, for memory that belongs to this runtime directory: a host's handle is
        a file's name, and a process may have sessions in several directories."""
        return handle

    @abstractmethod
    def open_memory(self, device: int, handle: bytes, nbytes: int, *, writable: bool) -> Memory:
        """Memory of another process; counted, one mapping a process."""

    @abstractmethod
    def free(self, memory: Memory) -> None:
        """Lets go what `allocate` or `open_memory` gave."""

    @abstractmethod
    def export(self, array: object) -> tuple[Memory, int]:
        """(the whole allocation, offset of the array's first byte) of an array the caller owns; ``NotExportable``."""

    @abstractmethod
    def anchored(self, memory: Memory) -> tuple[Memory, object]:
        """(the same memory, an object that lives for as long as any array made of that, or a view of one)."""

    @abstractmethod
    def array(
        self, memory: Memory, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Any:
        """A numpy or cupy array over `memory`; read-only where the mapping is."""
