"""Tear-down that may block: CUDA calls that wait for the device are made by a thread of their own, at a good moment.

Freeing memory, closing an imported mapping and unregistering a page wait inside the driver for all work of the device,
and meanwhile hold a lock that launches, event records and allocations of every thread need (seen). So they are not made
while a stream of ours waits for another process; what never becomes ready stays in quarantine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

_STUCK = 1.0  # seconds in one call after which another thread takes over
_POLL = 0.02


class _Task:
    __slots__ = ("done", "ready", "work")

    def __init__(self, work: Callable[[], object], ready: Callable[[], bool] | None) -> None:
        self.work, self.ready, self.done = work, ready, threading.Event()


class Quarantine:
    """Runs tear-down off the caller's thread. ``held``: how many tasks have not ended."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._lock = threading.RLock()  # re-entrant: the collector may come in between, and destroy events
        self._worker: threading.Thread | None = None
        self._since = 0.0  # when the worker's present call began; 0: it is in none
        self.held = 0

    def end(self, work: Callable[[], object], *, ready: Callable[[], bool] | None = None, moment: float = 0.1) -> bool:
        """Runs `work` once `ready()` is true (it must not block), and gives it `moment` seconds if that is now. Whether
        it ended."""
        task = _Task(work, ready)
        if ready is not None and not ready():
            moment = 0.0
        with self._lock:
            self.held += 1
            stuck = self._since and time.monotonic() - self._since > _STUCK
            if self._worker is None or stuck:
                self._since = 0.0
                self._worker = threading.Thread(target=self._run, name="ipcsync-cuda-teardown", daemon=True)
                try:
                    self._worker.start()
                except RuntimeError:  # the interpreter is ending, and the process's end frees everything
                    self._worker = None
                    return False
        self._tasks.put(task)
        return task.done.wait(moment)

    def _run(self) -> None:
        me = threading.current_thread()
        waiting: list[_Task] = []
        while self._worker is me:
            try:
                waiting.append(self._tasks.get(timeout=_POLL if waiting else None))
            except queue.Empty:
                pass
            waiting = [task for task in waiting if not self._try(task)]
        for task in waiting:  # another thread took over while we were stuck
            self._tasks.put(task)

    def _try(self, task: _Task) -> bool:
        if self._worker is not threading.current_thread():
            return False
        self._since = time.monotonic()
        try:
            if task.ready is not None and not task.ready():
                return False
            task.work()
        except Exception:
            pass  # the context is lost, or its process is ending: there is nothing left to free
        finally:
            if self._worker is threading.current_thread():
                self._since = 0.0
        with self._lock:
            self.held -= 1
        task.done.set()
        return True
