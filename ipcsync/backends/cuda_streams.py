"""Streams by any name: ours, CuPy's, torch's, ``__cuda_stream__``, a pointer. A raw stream is its pointer, an int.

The default streams have no device of their own (pointers 0, 1 and 2), so their raw stream remembers it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from types import TracebackType
from typing import Any

from ..errors import InvalidArgument
from .cuda_driver import Devices, Using, check
from .cuda_memory import cupy, loaded

LEGACY, PER_THREAD = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD; 0 means legacy as well


class DefaultStream(int):
    """A default stream of a device: ``int`` is its pointer."""

    device: int

    def __new__(cls, pointer: int, device: int) -> DefaultStream:
        made = super().__new__(cls, pointer or LEGACY)
        made.device = device
        return made


class KeptStream(int):
    """A stream that lives at least as long as its raw value does, wherever that is kept: a slot, a timeline, a budget.

    A driver call on a stream that was destroyed is a crash, and a new stream may get the address of an old one, whose
    work it would then be taken for. `owner`: somebody else's object, or what destroys our own stream.
    """

    owner: object
    device: int

    def __new__(cls, pointer: int, owner: object, device: int) -> KeptStream:
        made = super().__new__(cls, pointer)
        made.owner, made.device = owner, device
        return made


class OwnStream:
    """Destroys a stream of ours when nothing keeps it any more. What is enqueued on it still runs."""

    def __init__(self, driver: Any, handle: Any) -> None:
        self._destroy, self._handle = driver.cuStreamDestroy, handle

    def __del__(self) -> None:
        self._destroy(self._handle)


def key(raw: int) -> Hashable:
    """Equal for equal streams; a per-thread default stream is another one in each thread."""
    if isinstance(raw, DefaultStream):
        return (int(raw), raw.device, threading.get_ident() if raw == PER_THREAD else 0)
    return raw


class Streams:
    def __init__(self, driver: Any, devices: Devices) -> None:
        self._driver, self._devices = driver, devices
        self._externals: dict[tuple[int, int], Any] = {}
        self._defaults: dict[tuple[int, int], DefaultStream] = {}

    def raw(self, pointer: int, device: int, owner: object) -> int:
        return KeptStream(pointer, owner, device) if pointer > PER_THREAD else self.default(pointer, device)

    def default(self, pointer: int, device: int) -> DefaultStream:
        made = self._defaults.get((pointer, device))
        if made is None:
            made = self._defaults[pointer, device] = DefaultStream(pointer, device)
        return made

    def foreign(self, stream: object) -> tuple[int, int] | None:
        if isinstance(stream, bool):
            return None
        if isinstance(stream, DefaultStream):
            return stream, stream.device
        if isinstance(stream, int):
            return self._pointer(stream, stream)
        pointer = getattr(stream, "cuda_stream", None)  # torch.cuda.Stream
        if isinstance(pointer, int):
            return self._pointer(pointer, stream, stream.device_index)  # type: ignore[attr-defined]
        pointer = getattr(stream, "ptr", None)  # cupy.cuda.Stream
        if isinstance(pointer, int):
            return self._pointer(pointer, stream, getattr(stream, "device_id", -1))
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            version, pointer = protocol() if callable(protocol) else protocol
            if version != 0:
                raise InvalidArgument(f"__cuda_stream__ has version {version}; this ipcsync knows version 0")
            return self._pointer(int(pointer), stream)
        return self._torch(stream)

    def _torch(self, stream: object) -> tuple[int, int] | None:
        """A ``torch.Stream``, which knows its device but not its pointer."""
        torch = loaded("torch")
        if torch is None or not isinstance(stream, torch.Stream) or stream.device.type != "cuda":
            return None
        named = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return self._pointer(named.cuda_stream, stream, stream.device_index)

    def _pointer(self, pointer: int, owner: object, device: int = -1) -> tuple[int, int]:
        if pointer < 0:
            raise InvalidArgument(f"{pointer} is no stream's address")
        if device < 0:
            device = self.device_of(pointer)
        return self.raw(pointer, device, owner), device

    def device_of(self, pointer: int) -> int:
        """The device of a bare pointer: the current one for the default streams."""
        if pointer <= PER_THREAD:
            return self._devices.current()
        if self._devices.count == 1:
            return 0
        found = check(self._driver.cuStreamGetCtx(pointer), "cuStreamGetCtx")
        context = found[0] if isinstance(found, tuple) else found  # newer bindings add the green context
        with Using(self._driver, context):
            return int(check(self._driver.cuCtxGetDevice(), "cuCtxGetDevice"))

    def of_frameworks(self, device: int) -> dict[str, int]:
        """The current stream of each framework that the caller has loaded: "cupy", "torch"."""
        found = {}
        torch, numeric = loaded("torch"), loaded("cupy")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            stream = torch.cuda.current_stream(device)
            found["torch"] = self.raw(stream.cuda_stream, device, stream)
        if numeric is not None and hasattr(numeric, "cuda"):
            stream = numeric.cuda.get_current_stream(device)
            found["cupy"] = self.raw(stream.ptr, device, stream)
        return found

    def as_current(self, raw: int, device: int) -> AsCurrent:
        """CuPy's current stream for the block, its device current too."""
        return AsCurrent(self._devices.using(device), self._external(raw, device), raw)

    def _external(self, raw: int, device: int) -> Any:
        pointer = int(raw)  # and not what keeps the stream alive
        external = self._externals.get((pointer, device))
        if external is None:
            stream = cupy().cuda.Stream
            if isinstance(raw, DefaultStream):
                return stream.ptds if raw == PER_THREAD else stream.null
            if len(self._externals) > 1024:  # streams come and go; a wrapper is nothing but a pointer
                self._externals.clear()
            if hasattr(stream, "from_external"):
                with self._devices.using(device):
                    external = stream.from_external(_Pointer(pointer))
            else:  # CuPy 13
                external = cupy().cuda.ExternalStream(pointer, device)
            self._externals[pointer, device] = external
        return external


class _Pointer:
    """A pointer that speaks the CUDA stream protocol."""

    def __init__(self, raw: int) -> None:
        self._raw = raw

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._raw


class _Entered(threading.local):
    """What was made current in a thread, where CuPy keeps no more than the pointer. A block that is never left, of a
    slot that was dropped in its turn, must not leave a stream current that was destroyed."""

    def __init__(self) -> None:
        self.raws: list[int] = []


_entered = _Entered()


class AsCurrent:
    """A stream and its device, current for a block."""

    __slots__ = ("_raw", "_stream", "_using")

    def __init__(self, using: Using, stream: Any, raw: int) -> None:
        self._using, self._stream, self._raw = using, stream, raw

    def __enter__(self) -> None:
        self._using.__enter__()
        self._stream.__enter__()
        _entered.raws.append(self._raw)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stream.__exit__(kind, error, tb)
        self._using.__exit__(kind, error, tb)
        if self._raw in _entered.raws:  # not if another thread entered it
            _entered.raws.remove(self._raw)
