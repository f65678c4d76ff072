"""Streams, with torch's interface, on any backend; and what ``stream=`` may be anywhere in this library."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .backends import select
from .device import Device, as_device
from .errors import InvalidArgument, WrongDevice

if TYPE_CHECKING:
    from .backends.base import RawStream
    from .event import Event


class _Thread(threading.local):
    """The streams that are current in this thread, the innermost last, and how each ceases to be."""

    def __init__(self) -> None:
        self.stack: list[tuple[Stream, AbstractContextManager[None]]] = []


_thread = _Thread()


class Stream:
    """A queue of work on a device (torch.Stream); work, records and waits happen in the order they were put on it.

    ``Stream("cpu")`` is a daemon thread with a queue. `priority`: on cuda the lower number goes first; the host has
    one priority. Streams are equal when they are the same queue. On cuda other libraries take it by the CUDA stream
    protocol (``__cuda_stream__``).
    """

    def __init__(self, device: object = None, *, priority: int = 0) -> None:
        if not isinstance(priority, int):
            raise InvalidArgument(f"priority={priority!r}: it takes an int, where lower goes first")
        self.device = as_device(device)
        self._backend = select.backend(self.device)
        self._raw: RawStream = self._backend.new_stream(self.device.index, priority)
        self._owner = os.getpid()

    @classmethod
    def _of(cls, device: Device, raw: RawStream) -> Stream:
        """A view of a stream that somebody else owns."""
        made = cls.__new__(cls)
        made.device, made._backend, made._raw, made._owner = device, select.backend(device), raw, 0
        return made

    def record_event(self, event: Event | None = None) -> Event:
        """Records `event` here and returns it; without one, a new event that also measures time."""
        from .event import Event

        if event is None:
            event = Event(self.device, enable_timing=True)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Makes all further work of this stream wait for what `event` was last recorded behind.

        The host does not wait. An event that was never recorded is no wait: record it before.
        """
        if not callable(getattr(event, "wait", None)):
            raise InvalidArgument(f"{event!r} is no event: pass an ipcsync.Event or a shared event")
        event.wait(self)

    def wait_stream(self, stream: object) -> None:
        """Makes all further work of this stream wait for all that `stream` (ours or another library's) has been given
        so far, on any device of the same kind."""
        from .event import Event

        event = Event(self.device.type)
        event.record(stream)
        event.wait(self)

    def query(self) -> bool:
        """Whether all work it was given is done. Raises ``StreamFailed`` when a call of it raised."""
        return self._backend.stream_query(self._raw)

    def synchronize(self) -> None:
        """The host waits for all work it was given; a call that raised is raised here, as ``StreamFailed``."""
        self._backend.stream_synchronize(self._raw)

    def enqueue(self, fn: Callable[..., Any], *args: Any) -> None:
        """Puts work on the stream. Host: the call runs on its thread, in order. Cuda: `fn` is called at once with the
        stream current, and enqueues kernels. A call that raises on a host stream ends its work (``StreamFailed``)."""
        if not callable(fn):
            raise InvalidArgument(f"enqueue() takes a function and its arguments, not {fn!r}")
        self._backend.call(self._raw, self.device.index, fn, args)

    def __enter__(self) -> Stream:
        using = self._backend.using_stream(self._raw, self.device.index)
        using.__enter__()
        _thread.stack.append((self, using))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _, using = _thread.stack.pop()
        using.__exit__(kind, error, trace)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        key = self._backend.stream_key
        return self.device == other.device and key(self._raw) == key(other._raw)

    def __hash__(self) -> int:
        return hash((self.device, self._raw))

    def __getattr__(self, name: str) -> Any:
        # Only cuda streams have the protocol, so that a library that looks for it does not take a host stream.
        if name == "__cuda_stream__" and self.device.type == "cuda":
            return lambda: (0, int(self._raw))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __del__(self) -> None:
        if self.__dict__.get("_owner") == os.getpid() and not sys.is_finalizing():
            self._backend.drop_stream(self._raw)

    def __repr__(self) -> str:
        own = "" if self._owner else " (not ours)" if self._raw is not None else " (the calling thread)"
        return f"<ipcsync.Stream on {self.device}{own}>"


def current_stream(device: object = None) -> Stream:
    """The stream that work goes to when none is named: ours inside ``with stream:``, else the framework's current one;
    on the host the calling thread itself, where all work is done at once."""
    where = as_device(device)
    for stream, _ in reversed(_thread.stack):
        if stream.device == where:
            return stream
    return Stream._of(where, select.backend(where).current_stream(where.index))


def resolve(stream: object, device: Device, *, streams: str | None = None) -> RawStream:
    """The raw stream of any ``stream=`` argument, which must be of `device`.

    None is the current one; `streams` ("torch" or "cupy") says whose, where it is not ours. Raises ``WrongDevice``,
    ``AmbiguousStream`` (torch's and CuPy's differ), ``InvalidArgument`` (no stream at all).
    """
    if isinstance(stream, Stream):
        if stream.device == device:
            return stream._raw
    elif stream is None:
        for ours, _ in reversed(_thread.stack) if _thread.stack else ():
            if ours.device == device:
                return ours._raw
        if device.type == "cpu":
            return None  # the calling thread itself
        backend = select.backend(device)
        if streams is not None:
            theirs = backend.framework_streams(device.index).get(streams)
            if theirs is not None:
                return theirs
        return backend.current_stream(device.index)
    raw, where = locate(stream, device.type)
    if where != device:
        raise WrongDevice(f"the stream is on {where}, what it is used with on {device}: pass a stream of {device}")
    return raw


def resolve_any(stream: object, device: Device, *, streams: str | None = None) -> RawStream:
    """Like :func:`resolve` for what streams of every device of this kind may wait for. None is the current stream
    here, as torch has it: the innermost of ours, else that of the current device."""
    if isinstance(stream, Stream) and stream.device == device:
        return stream._raw
    if stream is not None:
        return locate(stream, device.type)[0]
    for ours, _ in reversed(_thread.stack):
        if ours.device.type == device.type:
            return ours._raw
    return resolve(None, Device(device.type, select.backend(device).current_device()), streams=streams)


def locate(stream: object, kind: str) -> tuple[RawStream, Device]:
    """Like :func:`resolve` for any device of this kind: the raw stream and where it is."""
    backend = select.backend(kind)
    if stream is None:
        for ours, _ in reversed(_thread.stack):
            if ours.device.type == kind:
                return ours._raw, ours.device
        index = backend.current_device()
        return backend.current_stream(index), Device(kind, index)
    if isinstance(stream, Stream):
        if stream.device.type != kind:
            raise WrongDevice(f"the stream is on {stream.device}, what it is used with on {kind}")
        return stream._raw, stream.device
    found = backend.foreign_stream(stream)
    if found is not None:
        return found[0], Device(kind, found[1])
    if any(hasattr(stream, name) for name in ("__cuda_stream__", "cuda_stream", "ptr")):
        raise WrongDevice(f"{stream!r} is a CUDA stream, and what it is used with is on {kind}")
    raise InvalidArgument(f"{stream!r} is no stream: pass ours, CuPy's, torch's, or (on cuda) a pointer")
