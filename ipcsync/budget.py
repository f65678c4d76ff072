"""The wait budget: how many streams of this process may be blocked on other processes at once (LEDGER.md rule 10).

A stream that is blocked on a word holds one of the process's C hardware queues, and with all C held every other stream
stalls, the one that would release them included. Streams that begin at once share what is left, so a quarter is kept
free (docs/decisions/0017): at most C - max(1, C // 4) streams are let block, and a wait beyond that keeps its caller
until one of them went on. A stream counts once, however many waits it holds.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from .errors import WaitTimeout, WouldBlock
from .waiting import Deadline

if TYPE_CHECKING:
    from .backends.base import Backend
    from .host_waits import Waiting

Wait = tuple[memoryview, int, int]  # words, the index of one, and what it has to reach


class Budget:
    """For one device. `limit`: how many of its streams may be blocked at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0  # how often a caller was kept
        self._blocked: dict[Hashable, deque[Wait]] = {}  # stream -> its waits, in order
        self._lock = threading.Lock()

    def enter(
        self,
        stream: Hashable,
        wait: Wait,
        deadline: Deadline,
        name: str,
        *,
        block: bool = True,
        check: Callable[[], None] = lambda: None,
        waiting: Callable[[], Waiting] | None = None,
    ) -> bool:
        """Takes a place for the stream; False when the wait was reached meanwhile and need not be enqueued.

        Raises ``WaitTimeout`` at the deadline and ``WouldBlock`` where `block` is false.
        """
        if reached(wait):
            return False
        if self.place(stream, wait):
            return True
        check()
        if not block:
            raise WouldBlock(f"waiting for {name!r} needs a hardware queue: {self._why()}")
        self.held += 1
        if self.held == 1:
            warnings.warn(f"a wait for {name!r} keeps its caller: {self._why()}", RuntimeWarning, stacklevel=4)
        if waiting is None:
            return self._keep(stream, wait, deadline, name, check)
        with waiting() as seen:

            def look() -> None:
                seen.still()
                check()

            return self._keep(stream, wait, deadline, name, look)

    def _keep(self, stream: Hashable, wait: Wait, deadline: Deadline, name: str, check: Callable[[], None]) -> bool:
        nap = 50e-6
        while True:
            if reached(wait):
                return False
            if self.place(stream, wait):
                return True
            check()
            left = deadline.left()
            if left == 0.0:
                raise WaitTimeout(
                    f"waiting for {name!r}: no place in the wait budget within {deadline.timeout:g} s; {self._why()}",
                    timeout=deadline.timeout,
                    budget=self.limit,
                )
            time.sleep(min(nap, left))
            nap = min(nap * 1.5, 1e-3)

    def place(self, stream: Hashable, wait: Wait) -> bool:
        """Takes a place for the stream if there is one."""
        with self._lock:
            waits = self._blocked.get(stream)
            if waits is None:
                if len(self._blocked) >= self.limit:
                    for other in list(self._blocked):
                        self._settle(other)
                    if len(self._blocked) >= self.limit:
                        return False
                waits = self._blocked[stream] = deque()
            try:
                while waits:
                    words, index, value = waits[0]
                    if words[index] < value:
                        break
                    waits.popleft()
            except ValueError:
                waits.popleft()  # unmapped meanwhile
            waits.append(wait)
            return True

    def _settle(self, stream: Hashable) -> None:
        """A stream is at the first of its waits that has not been reached; with none left it runs."""
        waits = self._blocked[stream]
        while waits and reached(waits[0]):
            waits.popleft()
        if not waits:
            del self._blocked[stream]

    def _why(self) -> str:
        return (
            f"the wait budget of this process is {self.limit} streams blocked on others at once (its hardware queues "
            "less a reserve) and all are; start it with a larger CUDA_DEVICE_MAX_CONNECTIONS (at most 32), or wait on "
            "fewer streams"
        )


def reached(wait: Wait) -> bool:
    words, index, value = wait
    try:
        return words[index] >= value
    except ValueError:
        return True  # unmapped meanwhile


_budgets: dict[tuple[Backend, int], Budget | None] = {}


def budget_of(backend: Backend, device: int) -> Budget | None:
    """This process's budget for a device, whichever session asks; None where streams hold no hardware queue."""
    key = (backend, device)
    if key not in _budgets:
        limit = backend.blocked_limit(device)
        _budgets.setdefault(key, None if limit is None else Budget(limit))
    return _budgets[key]
