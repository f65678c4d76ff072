"""The runtime directories of tests: one each, removed at its end, whatever ended it.

Whoever makes one holds it locked (``flock``, on the directory itself) until it is removed. The kernel drops the lock
when the process ends, also where that ran nothing more: a crash, the watchdog's last resort, SIGKILL. So a directory
that nobody holds is nobody's, in whatever container, and :func:`sweep` ends what still runs there and removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from .harness import KEPT, PREFIX, SHM, files_of, processes_of

LOGS = Path("/tmp")  # of brokers: harness.Broker


class Runtime:
    """A runtime directory of one test's own."""

    removed: set[Path] = set()  #: those that this process made, and removed

    def __init__(self) -> None:
        self._fd = -1
        while self._fd < 0:
            self.path = SHM / f"{PREFIX}{secrets.token_hex(6)}"
            self.path.mkdir(mode=0o700)
            self._fd = _hold(self.path)  # a sweep may have been faster: then there is another one

    def leaks(self, kept: Iterable[str] = KEPT, *, moment: float = 5.0, at_home: int | None = None) -> list[str]:
        """What is left: processes and files, each as a sentence. Whoever is just leaving gets a moment (seconds);
        `at_home` is the pid of who may stay."""
        deadline = time.monotonic() + moment
        while (left := self._look(kept, at_home)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def _look(self, kept: Iterable[str], at_home: int | None) -> list[str]:
        return [
            *(f"process {pid} still runs: {line}" for pid, line in processes_of(self.path) if pid != at_home),
            *(f"file {name} was left in the runtime directory" for name in files_of(self.path, kept)),
        ]

    def remove(self) -> None:
        """Ends what still runs in it and removes it."""
        try:
            _remove(self.path)
            self.removed.add(self.path)
        finally:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


def came_back() -> list[str]:
    """Directories of this process's tests that somebody made again after they were removed."""
    return sorted(str(path) for path in Runtime.removed if path.exists())


def sweep() -> list[str]:
    """Removes those that nobody holds: their tests are dead. Their names."""
    swept = []
    for path in SHM.glob(f"{PREFIX}*"):
        if path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.getuid():
            fd = _hold(path)
            if fd >= 0:
                try:
                    _remove(path)
                    swept.append(path.name)
                finally:
                    os.close(fd)
    for log in LOGS.glob(f"{PREFIX}*-broker-*.log"):
        if not (SHM / log.name.split("-broker-")[0]).exists():
            log.unlink(missing_ok=True)
    return swept


def _hold(path: Path) -> int:
    """The directory, open and locked by us; -1 if somebody else holds it, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # it may have been removed since
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return -1


def _remove(path: Path) -> None:
    """Until nobody is left who could make a file there, or the directory itself anew: who is killed is not gone yet."""
    deadline = time.monotonic() + 10.0
    while True:
        running = processes_of(path)
        for pid, _ in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(path, ignore_errors=True)
        if not running and not path.exists():
            break
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} cannot be removed: {running or list(path.iterdir())}")
        time.sleep(0.001)
    for log in LOGS.glob(f"{path.name}-broker-*.log"):
        log.unlink(missing_ok=True)
