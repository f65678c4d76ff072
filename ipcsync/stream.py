"""Streams, with torch's interface, on any backend; and what ``stream=`` may be anywhere in this library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .backends import select
from .device import Device, as_device
from .errors import InvalidArgument, WrongDevice

if TYPE_CHECKING:
    from .backends.base import RawStream
    from .event import Event

_current = threading.local()


class Stream:
    """A queue of work on a device (torch.Stream). ``Stream("cpu")`` is a daemon thread with a queue."""

    def __init__(self, device: object = None, *, priority: int = 0) -> None:
        self.device = as_device(device)
        self._backend = select.backend(self.device)
        self._raw: RawStream = self._backend.new_stream(self.device.index, priority)
        self._owned = True

    @classmethod
    def _of(cls, device: Device, raw: RawStream) -> Stream:
        made = cls.__new__(cls)
        made.device, made._backend, made._raw, made._owned = device, select.backend(device), raw, False
        return made

    def record_event(self, event: Event | None = None) -> Event:
        """Records `event` (or a new one) here and returns it."""
        from .event import Event

        if event is None:
            event = Event(self.device)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Makes all further work of this stream wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Makes all further work of this stream wait for what is enqueued on `stream` now."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Whether all work enqueued is done."""
        return self._backend.stream_query(self._raw)

    def synchronize(self) -> None:
        """The host waits for all work enqueued; a call that raised is raised here (``StreamFailed``)."""
        self._backend.stream_synchronize(self._raw)

    def enqueue(self, fn: Callable[..., Any], *args: Any) -> None:
        """Puts work on the stream. Host: the call runs on its thread, in order. Cuda: `fn` is called at once with the
        stream current, and enqueues kernels."""
        self._backend.call(self._raw, self.device.index, fn, args)

    def __enter__(self) -> Stream:
        stack = _stack()
        using = self._backend.using_stream(self._raw, self.device.index)
        using.__enter__()
        stack.append((self, using))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _, using = _stack().pop()
        using.__exit__(kind, error, trace)

    def __del__(self) -> None:
        if getattr(self, "_owned", False):
            self._backend.drop_stream(self._raw)

    def __repr__(self) -> str:
        return f"<ipcsync.Stream on {self.device}>"


def _stack() -> list[tuple[Stream, Any]]:
    stack: list[tuple[Stream, Any]] | None = getattr(_current, "stack", None)
    if stack is None:
        stack = _current.stack = []
    return stack


def current_stream(device: object = None) -> Stream:
    """The stream that work goes to when none is named: ours inside ``with stream:``, else the framework's current one."""
    where = as_device(device)
    for stream, _ in reversed(_stack()):
        if stream.device == where:
            return stream
    return Stream._of(where, select.backend(where).current_stream(where.index))


def resolve(stream: object, device: Device, *, streams: str | None = None) -> RawStream:
    """The raw stream of any ``stream=`` argument, which must be of `device`."""
    if stream is None:
        for ours, _ in reversed(_stack()):
            if ours.device == device:
                return ours._raw
        return select.backend(device).current_stream(device.index)
    if isinstance(stream, Stream):
        if stream.device != device:
            raise WrongDevice(f"the stream is on {stream.device}, what it is used with on {device}")
        return stream._raw
    found = select.backend(device).foreign_stream(stream)
    if found is None:
        raise InvalidArgument(f"{stream!r} is no stream: pass ours, CuPy's, torch's, or a pointer")
    if found[1] != device.index:
        raise WrongDevice(f"the stream is on {device.type}:{found[1]}, what it is used with on {device}")
    return found[0]
