"""GPU times for a trace: pairs of timed events on the stream, read once they are complete; nobody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import IpcSyncError
from .event import Event
from .stream import Stream

if TYPE_CHECKING:
    from .trace import Recorder

_TRACKS_AT = 1 << 24  # above every thread id


class GpuSpans:
    """The device spans of one recorder. On the host's streams it works the same, by their own clock."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._zero: dict[str, tuple[Event, int]] = {}  # by device: a completed event, and when it was
        self._open: list[tuple[str, int, str, Event, Event, dict[str, Any]]] = []
        self._tracks: dict[Any, int] = {}
        self._pool: dict[str, list[Event]] = {}

    @contextmanager
    def span(self, name: str, stream: Stream, args: dict[str, Any]) -> Iterator[None]:
        device = str(stream.device)
        begin, end = self._event(device), self._event(device)
        with self._lock:
            track = self._tracks.setdefault(id(stream), _TRACKS_AT + len(self._tracks))
        self._anchor(device, stream)
        begin.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            with self._lock:
                self._open.append((device, track, name, begin, end, args))
            self._collect(wait=False)

    def close(self) -> None:
        """Waits for what is still under way, and lets the events go."""
        self._collect(wait=True)
        self._pool.clear()
        self._zero.clear()

    def _event(self, device: str) -> Event:
        with self._lock:
            pool = self._pool.setdefault(device, [])
            return pool.pop() if pool else Event(device, enable_timing=True)

    def _anchor(self, device: str, stream: Stream) -> None:
        """Where the device's clock stands against the host's: once, when a device is first seen."""
        if device not in self._zero:
            zero = Event(device, enable_timing=True)
            zero.record(stream)
            zero.synchronize()
            self._zero[device] = (zero, time.monotonic_ns())

    def _collect(self, *, wait: bool) -> None:
        with self._lock:
            pairs, self._open = self._open, []
        left = []
        for pair in pairs:
            device, track, name, begin, end, args = pair
            zero, at = self._zero[device]
            try:
                if wait:
                    end.synchronize()
                elif not end.query():
                    left.append(pair)
                    continue
                start = at + int(zero.elapsed_time(begin) * 1e6)
                stop = start + int(begin.elapsed_time(end) * 1e6)
            except IpcSyncError:
                continue  # the stream has failed: its user is told by the stream itself
            self._recorder.on_track(track, f"{device} stream", name, start, stop, args)
            with self._lock:
                self._pool[device] += (begin, end)
        with self._lock:
            self._open = left + self._open
