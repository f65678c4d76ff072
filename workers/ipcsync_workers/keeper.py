"""Keeps the broker that a run has started: should it die, another one is started in the same runtime directory, takes
the dead one's page over, and the sessions come back to it. On a thread of its own, because whoever calls the broker
meanwhile waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ipcsync import endpoints, linux, runtime
from ipcsync.errors import IpcSyncError

LIMIT = 5  # starts in a row
DELAY = 0.1  # seconds before the first, twice as long before each further one
STEADY = 60.0  # seconds that one must have lived for the next not to count as in a row
_LOOK = 0.05


class Keeper:
    """Watches from its making until :meth:`close`; ``restarts`` counts. What happens is said by `say`.

    Only the broker that runs now is kept, and those that are started here. Where somebody else has started another one
    in its place, that one is theirs.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self.directory, self.restarts = directory, 0
        self._say, self._over = say, threading.Event()
        self._pid = self._start = 0
        self._since = time.monotonic()
        self._found()
        self._thread = threading.Thread(target=self._keep, name="ipcsync-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The run is over: the broker may leave. Returns once no start is under way."""
        self._over.set()
        self._thread.join()

    def _found(self) -> None:
        pid = runtime.broker_pid(self.directory)
        if pid:  # else it is dead already
            self._pid, self._start, self._since = pid, linux.start_time(pid), time.monotonic()

    def _dead(self) -> bool:
        """Whether it is gone, a zombie included: who has started it may not have looked yet. One whose other threads
        are still dying has its lock."""
        found = linux.process_state(self._pid)
        if found is not None and found[0] not in "ZX" and found[1] == self._start:
            return False
        return runtime.broker_pid(self.directory) != self._pid

    def _taken(self) -> bool:
        """Whether somebody else has started a broker meanwhile: it is theirs."""
        return runtime.broker_pid(self.directory) is not None

    def _keep(self) -> None:
        tried = 0
        while not self._over.wait(_LOOK):
            if not self._dead():
                continue
            if self._taken():
                return
            if time.monotonic() - self._since >= STEADY:
                tried = 0
            if tried == LIMIT:
                self._say(f"the broker died {LIMIT} times in a row: it is not started again")
                return
            delay, tried = DELAY * 2**tried, tried + 1
            self._say(f"the broker died (pid {self._pid}); start {tried} of {LIMIT} in {delay:g} s")
            if self._over.wait(delay) or self._taken():
                return
            try:
                endpoints.start_broker_in(self.directory)
            except (IpcSyncError, OSError) as error:
                self._say(f"the broker did not start: {error}")
                continue
            self.restarts += 1
            self._found()
            self._say(f"the broker runs again (pid {self._pid})")
