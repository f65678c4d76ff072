"""What streams were given and may not have passed yet: what they wait for, and whether they are through."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import CaptureUnsupported, DeviceLost

if TYPE_CHECKING:
    from .cuda import CudaBackend
    from .cuda_events import CudaEvent

_PRUNE = 64


class Pending:
    """The words and interprocess events that streams were made to wait for, until they are seen reached.

    `finished` asks CUDA about an event. One that another process records anew counts again: that is too long, never
    too short.
    """

    def __init__(self, finished: Callable[[CudaEvent], bool]) -> None:
        self._finished = finished
        self._waits: deque[tuple[memoryview, int, int]] = deque()
        self._events: set[CudaEvent] = set()
        self._prune_at = _PRUNE
        self._lock = threading.RLock()  # re-entrant: the collector may come in between, and destroy events

    def add_event(self, event: CudaEvent) -> None:
        self._events.add(event)

    def forget_event(self, event: CudaEvent) -> None:
        """It is about to be destroyed: it must not be asked about after that."""
        with self._lock:
            self._events.discard(event)

    def add(self, words: memoryview, index: int, value: int) -> None:
        self._waits.append((words, index, value))
        if len(self._waits) > self._prune_at:
            self.none()
            self._prune_at = max(_PRUNE, 2 * len(self._waits))  # else each further one goes through all that wait

    def none(self) -> bool:
        """Whether no stream waits now, so that a call which waits for the device ends by itself."""
        waits = self._waits
        with self._lock:
            for _ in range(len(waits)):  # others may append meanwhile
                if not waits:
                    break  # the collector came in between, and called this
                wait = waits.popleft()
                if not _reached(wait):
                    waits.append(wait)
            for event in tuple(self._events):
                # Taken out first: who adds it while it is asked about waits for a later record.
                self._events.discard(event)
                if not self._finished(event):
                    self._events.add(event)
            return not waits and not self._events


def _reached(wait: tuple[memoryview, int, int]) -> bool:
    words, index, value = wait
    try:
        return words[index] >= value
    except ValueError:
        return True  # unmapped, for which its waits had to be over


class Passed:
    """Whether a stream has done what it was given. Looked at when somebody asks, which is seldom, so that a wait costs
    nothing more: a stream that is busy then is given a mark, and has passed when it reaches that. Until it is `asked`
    it stands for what the stream is given meanwhile as well."""

    asked = False

    def __init__(self, backend: CudaBackend, raw: int) -> None:
        self._backend, self._raw, self._done = backend, raw, False
        self._mark: CudaEvent | None = None
        if isinstance(getattr(raw, "owner", None), int):
            self()  # a bare pointer: nothing here keeps its stream alive until somebody asks

    def __call__(self) -> bool:
        backend, self.asked = self._backend, True
        if self._done:
            return True
        try:
            if self._mark is not None:
                self._done = backend.event_query(self._mark)
            elif backend.stream_query(self._raw):
                self._done = True
            else:
                where = backend.stream_device(self._raw)
                mark = backend.event_create(where, timing=False, blocking=False, interprocess=False)
                backend.event_record(mark, self._raw)
                self._mark = mark
        except DeviceLost:
            self._done = True  # nothing of it runs any more
        except CaptureUnsupported:
            pass
        return self._done

    def __del__(self) -> None:
        if self._mark is not None:
            self._backend.event_destroy(self._mark)
