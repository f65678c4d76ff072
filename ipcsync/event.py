"""Events, with torch's interface (torch.Event), on any backend."""

from __future__ import annotations

import weakref
from typing import Any

from .backends import select
from .device import Device, as_device
from .errors import InvalidArgument, InvalidState
from .stream import Stream, resolve

_exported: weakref.WeakValueDictionary[bytes, Event] = weakref.WeakValueDictionary()


class Event:
    """A point in a stream's work. See docs/reference/torch-event.md for torch's own words and the tests of each."""

    def __init__(
        self,
        device: object = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        if enable_timing and interprocess:
            raise InvalidArgument("an interprocess event cannot measure time: leave enable_timing out")
        self.device = as_device(device)
        self._backend = select.backend(self.device)
        self._timing, self._blocking, self._interprocess = enable_timing, blocking, interprocess
        self._raw: Any = None
        self._handle: bytes | None = None
        self._opened = False

    def _event(self) -> Any:
        if self._raw is None:
            self._raw = self._backend.event_create(
                self.device.index, timing=self._timing, blocking=self._blocking, interprocess=self._interprocess
            )
        return self._raw

    def record(self, stream: object = None) -> None:
        self._backend.event_record(self._event(), resolve(stream, self.device))

    def wait(self, stream: object = None) -> None:
        if self._raw is not None:
            self._backend.event_wait(self._raw, resolve(stream, self.device))

    def query(self) -> bool:
        return self._raw is None or self._backend.event_query(self._raw)

    def synchronize(self) -> None:
        if self._raw is not None:
            self._backend.event_synchronize(self._raw)

    def elapsed_time(self, end_event: Event) -> float:
        if not (self._timing and end_event._timing):
            raise InvalidState("both events need enable_timing=True")
        if self._raw is None or end_event._raw is None:
            raise InvalidState("both events must have been recorded")
        return self._backend.event_elapsed(self._raw, end_event._raw)

    def ipc_handle(self) -> bytes:
        if self._opened:
            raise InvalidState("an event opened from a handle cannot be exported again: pass the handle on")
        if not self._interprocess:
            raise InvalidState("only an event made with interprocess=True has a handle")
        if self._handle is None:
            self._handle = self._backend.event_export(self._event())
            _exported[self._handle] = self
        return self._handle

    @classmethod
    def from_ipc_handle(cls, device: object, handle: bytes) -> Event:
        if handle in _exported:
            return _exported[handle]
        made = cls(device, interprocess=True)
        made._raw = made._backend.event_open(made.device.index, handle)
        made._opened = True
        return made

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None:
            self._backend.event_destroy(self._raw)


__all__ = ["Device", "Event", "Stream"]
