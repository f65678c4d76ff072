"""Layer 1 events of the host: a small file each, no broker (LEDGER.md rule 13).

A record takes a ticket under the file's POSIX lock (any opener may record) and completes it in its own place of a ring,
so that each word has one writer. A wait is for the ticket that was the latest when it was called, as CUDA's is.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

from .. import linux, runtime
from ..errors import HandleInvalid, InvalidState, PeerDied, PeerFailed
from ..shm import Region
from ..waiting import SLICE

MAGIC = int.from_bytes(b"IPCSEVT1", "little")
RING = 64
_ISSUED, _CREATOR, _START = 1, 2, 3
_AT = 8  # the ring: (done ticket, recorder pid, recorder start, finished at) each
CONDEMNED = 1 << 63
_HANDLE = b"ipcsyncH"
_lock = threading.Lock()  # fcntl locks are per process


class HostEvent:
    def __init__(self, path: Path, region: Region, *, ours: bool) -> None:
        self._path, self._region, self._ours = path, region, ours
        self._words = region.words
        self._start = linux.start_time(os.getpid())

    @classmethod
    def create(cls, *, timing: bool) -> HostEvent:
        folder = runtime.directory(create=True) / "l1"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / os.urandom(16).hex()

        def fill(region: Region) -> None:
            region.words[_CREATOR], region.words[_START] = os.getpid(), linux.start_time(os.getpid())
            region.words[0] = MAGIC

        return cls(path, Region.create(path, 8 * (_AT + 4 * RING), fill), ours=True)

    @classmethod
    def open(cls, handle: bytes) -> HostEvent:
        if len(handle) != 64 or not handle.startswith(_HANDLE):
            raise HandleInvalid("these bytes are no event handle of the host: they come from Event.ipc_handle()")
        path = runtime.directory(create=False) / "l1" / handle[8:24].hex()
        try:
            region = Region.open(path)
        except FileNotFoundError:
            raise HandleInvalid("the event of this handle is gone: its creator ended or dropped it") from None
        return cls(path, region, ours=False)

    def handle(self) -> bytes:
        return (_HANDLE + bytes.fromhex(self._path.name)).ljust(64, b"\0")

    @property
    def issued(self) -> int:
        return int(self._words[_ISSUED])

    def _place(self, ticket: int) -> int:
        return _AT + 4 * (ticket % RING)

    def begin(self) -> int:
        with _lock:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX)
                ticket = self.issued + 1
                at = self._place(ticket)
                if ticket > RING and not self.done(ticket - RING):
                    raise InvalidState(f"{RING} records of this event are pending already: synchronize first")
                self._words[at + 1], self._words[at + 2] = os.getpid(), self._start
                self._words[_ISSUED] = ticket
            finally:
                os.close(fd)
        return ticket

    def complete(self, ticket: int) -> None:
        at = self._place(ticket)
        self._words[at + 3] = time.perf_counter_ns()
        self._words[at] = ticket
        linux.futex_wake(self._region.address + 8 * at)

    def condemn(self, ticket: int) -> None:
        at = self._place(ticket)
        self._words[at] = ticket | CONDEMNED
        linux.futex_wake(self._region.address + 8 * at)

    def done(self, ticket: int) -> bool:
        if ticket == 0:
            return True
        value = self._words[self._place(ticket)]
        if value & CONDEMNED and value & ~CONDEMNED >= ticket:
            raise PeerFailed("work before this event's record raised: it will never be true", round=ticket)
        return bool(value & ~CONDEMNED >= ticket)

    def wait(self, ticket: int) -> None:
        at = self._place(ticket)
        while not self.done(ticket):
            seen = self._words[at]
            pid, start = self._words[at + 1], self._words[at + 2]
            if linux.start_time(pid) != start and not self.done(ticket):
                raise PeerDied(
                    f"process {pid} died with its record of this event pending", session="", pid=pid, round=ticket
                )
            linux.futex_wait(self._region.address + 8 * at, seen, SLICE)

    def finished_at(self) -> int:
        return int(self._words[self._place(self.issued) + 3])

    def close(self) -> None:
        if self._ours:
            self._path.unlink(missing_ok=True)


def sweep(directory: Path) -> None:
    """Removes the events of a runtime directory whose creator is gone: pid and start time name it for good."""
    for path in (directory / "l1").glob("*"):
        try:
            region = Region.open(path, writable=False)
        except OSError:
            continue  # just removed by its creator, or no file of ours
        creator, start = region.words[_CREATOR], region.words[_START]
        region.close()
        if linux.start_time(creator) != start:
            path.unlink(missing_ok=True)
