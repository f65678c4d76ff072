"""Layer 1 events of the host: words with futexes, in a file where other processes shall open them (LEDGER.md rule 13).

Each record takes the next **ticket**. A wait is for the ticket that was the latest when it was called, as CUDA's is; so
one event may be recorded on many streams, and an old ticket may complete after a newer one. Records of one stream
complete in order, so each stream that records gets a **lane**: ``DONE`` is its last completed ticket, and has one
writer, the stream. ``ISSUED`` holds the latest ticket and its lane in one word, so that both are read whole. A lane
goes to another stream only once all it issued is complete; a lane whose stream failed, or whose process died with a
record pending, is kept for good, because it is what tells its waiters so.

Tickets are taken under a POSIX lock on the file, because any opener may record: the kernel lets it go if its holder
dies. It is per process, so threads take a lock of their own first; and closing any descriptor of a file drops it, so a
process opens each file once.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import linux, runtime
from ..errors import HandleInvalid, InvalidState, NotExportable, PeerDied, PeerFailed, QuotaExceeded
from ..shm import Region
from ..waiting import Deadline, Words, wait_word
from .host_stream import HostStream

MAGIC = int.from_bytes(b"IPCSEVT2", "little")
HANDLE_BYTES = 64
CONDEMNED = 1 << 63  # in DONE: this ticket will never be true, nor will later ones of the lane
LANES = 64
_ISSUED, _CREATOR, _START, _NAMESPACE = 1, 2, 3, 4
_LANES_AT, _LANE_WORDS = 8, 5
_DONE, _LAST, _OWNER, _OWNER_START, _OWNER_NAMESPACE = range(_LANE_WORDS)
_NWORDS = _LANES_AT + LANES * _LANE_WORDS
_LANE_BITS = 6
_PID_SHIFT = 40  # OWNER: the process above the number of its stream
_TAG = b"ipcsyncH"
_FOLDER = runtime.EVENTS

Ticket = tuple[int, int]  # (number, lane); number 0: nothing was recorded


class _Private:
    """Words of this process alone, for events that nobody else shall open."""

    def __init__(self, count: int) -> None:
        memory = (ctypes.c_uint64 * count)()
        self.words, self.address = memoryview(memory).cast("B").cast("Q"), ctypes.addressof(memory)
        self.bell_of: Callable[[int], int | None] = lambda _: None


_events: weakref.WeakValueDictionary[Path, HostEvent] = weakref.WeakValueDictionary()  # one an event and process
_opening = threading.RLock()  # re-entrant: the collector may come in between
_swept: set[Path] = set()


def _folder() -> Path:
    """Where the event files of the runtime directory are. What dead processes left there is removed once a process."""
    directory = runtime.directory(create=True)
    folder = directory / _FOLDER
    folder.mkdir(mode=0o700 | os.stat(directory).st_mode & 0o070, exist_ok=True)  # open to its guests as well
    if folder not in _swept:
        _swept.add(folder)
        sweep(directory)
    return folder


def _where(folder: Path) -> bytes:
    """16 bytes that are the same for whoever sees this folder, under whatever path."""
    found = os.stat(folder)
    return found.st_dev.to_bytes(8, "little") + found.st_ino.to_bytes(8, "little")


class HostEvent:
    """One event, as one process sees it. `path` is None for one of this process alone."""

    def __init__(self, memory: Words, path: Path | None = None, *, ours: bool = True) -> None:
        self._memory, self._words = memory, memory.words
        self._path, self.ours = path, ours
        self._fd = -1 if path is None else os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._pid, self._start, self._namespace = _identity()
        self._lock = threading.Lock()
        self._lane_of: dict[int, int] = {}  # by the stream's number; the words say whether it still holds
        self._cause: BaseException | None = None
        self.finished = (0, 0)  # the latest ticket completed here and when, in ns: timing is for events of one process

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if getattr(self, "_fd", -1) >= 0:
            close(self._fd)

    @classmethod
    def create(cls, *, interprocess: bool) -> HostEvent:
        if not interprocess:
            return cls(_Private(_NWORDS))
        path = _folder() / os.urandom(16).hex()

        def fill(region: Region) -> None:
            region.words[_CREATOR], region.words[_START], region.words[_NAMESPACE] = _identity()
            region.words[0] = MAGIC

        try:
            made = _events[path] = cls(Region.create(path, 8 * _NWORDS, fill), path)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise _too_many_files() from None
            raise
        return made

    @classmethod
    def open(cls, handle: bytes) -> HostEvent:
        """The event of a handle; in a process that has it already, that one."""
        if not isinstance(handle, bytes) or len(handle) != HANDLE_BYTES or not handle.startswith(_TAG):
            raise HandleInvalid(
                "this is no handle of a host event: it takes the 64 bytes of ipc_handle() of an event made with "
                'device="cpu", interprocess=True'
            )
        folder = runtime.default_directory() / _FOLDER
        path = folder / handle[8:24].hex()
        with _opening:
            found = _events.get(path)
            if found is not None and found._pid == os.getpid():
                return found
            try:
                region = Region.open(path)
                if region.nbytes < 8 * _NWORDS or region.words[0] != MAGIC:
                    raise HandleInvalid("the event of this handle is of another version of ipcsync: share one")
                made = _events[path] = cls(region, path, ours=False)
            except FileNotFoundError:
                if not folder.is_dir() or handle[24:40] != _where(folder):
                    raise HandleInvalid(
                        f"the handle is of another runtime directory than {folder.parent}: set IPCSYNC_RUNTIME_DIR to "
                        "the same in both processes"
                    ) from None
                raise HandleInvalid("the event of this handle is gone: its creator ended, or let it go") from None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise _too_many_files() from None
                raise
            return made

    def handle(self) -> bytes:
        if self._path is None or not self.ours:
            raise NotExportable("only an event made here with interprocess=True has a handle")
        return (_TAG + bytes.fromhex(self._path.name) + _where(self._path.parent)).ljust(HANDLE_BYTES, b"\0")

    def close(self) -> None:
        """Its creator removes the name. Whoever has it open, and work that is queued, goes on with it."""
        if self.ours and self._path is not None and self._pid == os.getpid():
            self._path.unlink(missing_ok=True)

    # -- recording

    @property
    def latest(self) -> Ticket:
        """The ticket of the latest record."""
        issued = self._words[_ISSUED]
        return issued >> _LANE_BITS, issued & (LANES - 1)

    def record(self, stream: HostStream | None) -> None:
        """Records on the stream, or on the calling thread, where all before it is done already."""
        with self._lock:
            if self._fd < 0:
                self._record(stream)
                return
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX)
                self._record(stream)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _record(self, stream: HostStream | None) -> None:
        words = self._words
        lane = 0 if stream is None else self._lane(stream.number)
        at = _LANES_AT + lane * _LANE_WORDS
        # More than the lane's last too: an interrupt between here and the last line may have left that one unissued.
        number = max(words[_ISSUED] >> _LANE_BITS, words[at + _LAST]) + 1
        words[at + _LAST] = number
        if stream is None:  # complete as it is issued, so that whoever has the lock may write it
            self.complete(number, lane)
        else:
            stream.put(self.complete, (number, lane), partial(self.condemn, number, lane))
        words[_ISSUED] = number << _LANE_BITS | lane

    def _lane(self, stream: int) -> int:
        """The stream's lane, or a free one made its."""
        words, owner = self._words, self._pid << _PID_SHIFT | stream
        lane = self._lane_of.get(stream)
        if lane is not None:
            at = _LANES_AT + lane * _LANE_WORDS
            if words[at + _OWNER] == owner and not words[at + _DONE] & CONDEMNED:
                return lane
        for lane in range(1, LANES):
            at = _LANES_AT + lane * _LANE_WORDS
            if words[at + _DONE] == words[at + _LAST]:
                words[at + _OWNER], words[at + _OWNER_START] = owner, self._start
                words[at + _OWNER_NAMESPACE] = self._namespace
                if len(self._lane_of) >= LANES:  # streams come and go
                    self._lane_of.clear()
                self._lane_of[stream] = lane
                return lane
        raise InvalidState(
            f"records of this event are pending on {LANES - 1} streams (or failed there, or died with them): "
            "synchronize, or make a new event"
        )

    def complete(self, number: int, lane: int) -> None:
        if number > self.finished[0]:
            self.finished = (number, time.perf_counter_ns())
        self._done(lane, number)

    def condemn(self, number: int, lane: int, cause: BaseException) -> None:
        """The work before the record raised."""
        at = _LANES_AT + lane * _LANE_WORDS + _DONE
        if not self._words[at] & CONDEMNED:  # the first bad one stays
            self._cause = cause
            self._done(lane, number | CONDEMNED)

    def _done(self, lane: int, value: int) -> None:
        at = _LANES_AT + lane * _LANE_WORDS + _DONE
        self._words[at] = value
        linux.futex_wake(self._memory.address + 8 * at)

    # -- waiting

    def done(self, ticket: Ticket) -> bool:
        """Whether the record is complete; raises if it never will be, because the work before it raised."""
        number, lane = ticket
        value = self._words[_LANES_AT + lane * _LANE_WORDS + _DONE]
        if value & CONDEMNED and value ^ CONDEMNED <= number:
            pid = self._words[_LANES_AT + lane * _LANE_WORDS + _OWNER] >> _PID_SHIFT
            raise PeerFailed(
                f"work of process {pid} before its record of this event raised: the record will never be true",
                session="",
                pid=pid,
                round=number,
                name="",
            ) from self._cause
        return bool(value >= number)

    def query(self) -> bool:
        """Whether the latest record is complete; raises if it never will be, so that nobody polls for ever."""
        ticket = self.latest
        if self.done(ticket):
            return True
        self._alive(*ticket)
        return self.done(ticket)

    def wait(self, ticket: Ticket) -> None:
        """The calling thread waits for the record. ``PeerDied`` when its process died with it pending."""
        if self.done(ticket):
            return
        number, lane = ticket
        at = _LANES_AT + lane * _LANE_WORDS
        wait_word(
            self._memory,
            at + _DONE,
            number,
            Deadline(None),
            check=lambda: self._alive(number, lane),
            what=lambda: "the event's record",
        )
        self.done(ticket)

    def _alive(self, number: int, lane: int) -> None:
        words, at = self._words, _LANES_AT + lane * _LANE_WORDS
        pid, start = words[at + _OWNER] >> _PID_SHIFT, words[at + _OWNER_START]
        if pid == self._pid and words[at + _OWNER_NAMESPACE] == self._namespace:
            if sys.is_finalizing():
                raise InvalidState("the interpreter is exiting and its stream threads have ended: synchronize before")
            return
        if words[at + _OWNER_NAMESPACE] != self._namespace:
            return  # a pid of another namespace says nothing here
        if linux.start_time(pid) != start and words[at + _DONE] < number:
            raise PeerDied(
                f"process {pid} died with its record of this event pending: it will never be true",
                session="",
                pid=pid,
                round=number,
                name="",
            )


def _too_many_files() -> QuotaExceeded:
    return QuotaExceeded(
        "each interprocess event of the host takes two open files, and this process has as many as it may: let some "
        "go, or raise its limit (`ulimit -n`)",
        resource="open files",
        limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _identity() -> tuple[int, int, int]:
    """(pid, start time, pid namespace) of this process; a forked child is another one."""
    pid = os.getpid()
    if pid not in _identities:
        _identities.clear()
        _identities[pid] = (pid, linux.start_time(pid), linux.pid_namespace())
    return _identities[pid]


_identities: dict[int, tuple[int, int, int]] = {}


def sweep(directory: Path) -> None:
    """Removes the events of a runtime directory whose creator is gone: pid and start time name it for good."""
    namespace = _identity()[2]
    for path in (directory / _FOLDER).glob("*"):
        try:
            region = Region.open(path, writable=False)
        except (OSError, ValueError):
            continue  # just removed by its creator, or no file of ours
        words: Any = region.words
        gone = (
            len(words) >= _NWORDS
            and words[0] == MAGIC
            and words[_NAMESPACE] == namespace
            and linux.start_time(words[_CREATOR]) != words[_START]
        )
        region.close()
        if gone:
            path.unlink(missing_ok=True)


@atexit.register
def _unlink_ours() -> None:
    """At exit, where the collector does not come to every event."""
    for event in list(_events.values()):
        event.close()
