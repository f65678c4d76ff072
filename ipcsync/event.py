"""Events, with torch's interface (torch.Event), on any backend."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from .backends import select
from .device import Device, as_device, parse
from .errors import ForkedProcess, InvalidArgument, InvalidState, WrongDevice
from .stream import locate, resolve

if TYPE_CHECKING:
    from .backends.base import RawEvent

_making = threading.RLock()  # re-entrant: the collector may come in between
_exported: weakref.WeakValueDictionary[bytes, Event] = weakref.WeakValueDictionary()


class Event:
    """A point in a stream's work, to wait for, ask about, and measure time between.

    `device`: where it is recorded; None is the accelerator if there is one, else the CPU. A device without an ordinal
    ("cuda") is decided by the first record, or by ``ipc_handle()``. `enable_timing`: it measures time. `blocking`: the
    host sleeps in ``synchronize()`` rather than polls (the host's events always sleep). `interprocess`: it can be
    exported; such an event cannot measure time (``InvalidArgument``).

    Thread-safe. Of no use in a forked child (``ForkedProcess``).
    """

    def __init__(
        self,
        device: object = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        if enable_timing and interprocess:
            raise InvalidArgument("an interprocess event cannot measure time: leave enable_timing or interprocess out")
        kind, index = parse(device)
        self._backend = select.backend(kind)
        self._device = None if index is None else as_device(device)
        self._timing, self._blocking, self._interprocess = enable_timing, blocking, interprocess
        self._raw: RawEvent = None
        self._handle: bytes | None = None
        self._opened = False
        self._owner = os.getpid()

    @property
    def device(self) -> Device:
        """Where it is recorded; while that is open, the current device."""
        return self._device or Device(self._backend.device_type, self._backend.current_device())

    def record(self, stream: object = None) -> None:
        """Marks this point in the stream's work; the current stream's, if none is given.

        What the event said before is forgotten: it stands for its latest record. ``WrongDevice`` for a stream of
        another device, ``StreamFailed`` for one whose work raised.
        """
        if self._device is None:
            raw, self._device = locate(stream, self._backend.device_type)
        else:
            raw = resolve(stream, self._device)
        self._backend.event_record(self._made(), raw)

    def wait(self, stream: object = None) -> None:
        """Makes all further work of the stream (the current one, if none is given) wait for this event.

        It is the latest record at the time of this call that is waited for; with none, nothing is. The host does not
        wait, unless the stream is the calling thread itself (the host's default stream).
        """
        raw, _ = locate(stream, self._backend.device_type)
        if self._raw is not None:
            self._backend.event_wait(self._made(), raw)

    def query(self) -> bool:
        """Whether the work before the latest record is done; True when it was never recorded."""
        return self._raw is None or self._backend.event_query(self._made())

    def synchronize(self) -> None:
        """The host waits until the work before the latest record is done.

        Raises ``PeerFailed`` when that work raised, ``PeerDied`` when its process died (on the host; CUDA cannot tell).
        """
        if self._raw is not None:
            self._backend.event_synchronize(self._made())

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between this event's latest record and `end_event`'s.

        ``InvalidState`` unless both were made with ``enable_timing=True``, recorded, and are complete.
        """
        if not isinstance(end_event, Event) or end_event._backend is not self._backend:
            raise InvalidArgument(f"elapsed_time() takes another event of {self._backend.device_type}: {end_event!r}")
        if not (self._timing and end_event._timing):
            raise InvalidState("elapsed_time needs both events made with enable_timing=True")
        if self._raw is None or end_event._raw is None:
            raise InvalidState("elapsed_time needs both events recorded")
        return self._backend.event_elapsed(self._made(), end_event._made())

    def ipc_handle(self) -> bytes:
        """64 bytes by which ``from_ipc_handle`` opens this event in another process, as long as this one keeps it.

        An event not yet recorded is made on the current device. ``InvalidState`` unless it was made here with
        ``interprocess=True``: an opened event cannot be exported again (but a shared event's ``cuda_event()`` knows
        the handle it came from).
        """
        if self._opened and self._handle is None:
            raise InvalidState("an event opened from a handle cannot be exported again: pass its handle on")
        if not self._interprocess:
            raise InvalidState("only an event made with interprocess=True has a handle")
        if self._handle is None:
            self._handle = self._backend.event_export(self._made())
            _exported[self._handle] = self
        return self._handle

    @classmethod
    def from_ipc_handle(cls, device: object, handle: bytes) -> Event:
        """The event of another process, from its handle; in the process that exported it, that event itself.

        On the host both processes need the same runtime directory. ``HandleInvalid`` for bytes that open nothing.
        """
        found = _exported.get(handle) if isinstance(handle, bytes) else None
        if found is not None and found._owner == os.getpid():
            kind, index = parse(device)
            if found.device != Device(kind, found.device.index if index is None else index):
                raise WrongDevice(f"the event of this handle is on {found.device}, not on {device}")
            return found
        made = cls(device, interprocess=True)
        made._device = made.device
        made._raw = made._backend.event_open(made._device.index, handle)
        made._opened = True
        return made

    @property
    def cuda_event(self) -> int:
        """The CUDA event's address, by torch's name for it: for C, valid while this object lives. ``InvalidState`` on
        the CPU."""
        if self._backend.device_type != "cuda":
            raise InvalidState("an event on the CPU has no CUDA event")
        return int(self._made())

    def _made(self) -> RawEvent:
        if self._owner != os.getpid():
            raise ForkedProcess(
                "this event was made before the process was forked: make or open it anew here, or start children with "
                'multiprocessing\'s "spawn" method'
            )
        if self._raw is None:
            with _making:
                if self._raw is None:
                    self._device = self.device
                    self._raw = self._backend.event_create(
                        self._device.index,
                        timing=self._timing,
                        blocking=self._blocking,
                        interprocess=self._interprocess,
                    )
        return self._raw

    def __del__(self) -> None:
        raw = self.__dict__.get("_raw")
        if raw is not None and self._owner == os.getpid() and not sys.is_finalizing():
            self._backend.event_destroy(raw)

    def __repr__(self) -> str:
        return f"<ipcsync.Event on {self._device or self._backend.device_type}{', opened' if self._opened else ''}>"
