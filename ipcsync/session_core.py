"""What a session is made of, for events, channels and arrays: its link to the broker, its block of the ledger, the
handles it holds, and the timelines of what it opened. ``session.py`` has what a user calls.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import __version__, errors, linux, wire
from .budget import budget_of, reached
from .endpoints import elsewhere, start_broker_in
from .host_waits import BUDGET
from .ledger import LAYOUT, Block, Ledger
from .life import LifeFile, seen
from .link import Link
from .shm import Region
from .stead import Stead
from .stream import Stream, resolve, resolve_any
from .timeline import Timeline, verdict_error
from .wait_table import WaitTable
from .waiting import UNSET, Deadline, Timeout, Unset

if TYPE_CHECKING:
    from collections.abc import Callable

    from .backends.base import Backend, RawStream
    from .budget import Budget
    from .device import Device
    from .event import Event
    from .keys import Line
    from .many import Waiter

S = TypeVar("S")


class SessionCore:
    """One process's membership of a broker. Any thread may use it; a forked child may not."""

    def __init__(
        self,
        directory: Path,
        name: str | None,
        namespace: str,
        streams: str | None,
        deadline: Deadline,
        default_timeout: float | None,
        line: Line | None = None,
        start_broker: bool = False,
    ) -> None:
        pid = os.getpid()
        self.runtime, self.namespace = directory, namespace
        self.name = name or f"{_program()}-{pid}"
        self.default_timeout = default_timeout
        self.streams = streams
        self.number = self.block = 0
        self.told = 0  # how many taints the caller has been told of
        self.boot = b""
        self._pid, self._start = pid, linux.start_time(pid)
        self._refusal: errors.IpcSyncError | None = None
        self._adopted: dict[int, Any] = {}
        self._handles: Counter[int] = Counter()  # incarnation -> how many handles of it are open here
        self._timelines: weakref.WeakValueDictionary[tuple[int, int], Timeline] = weakref.WeakValueDictionary()
        self._registered: list[Backend] = []  # those whose devices reach the ledger
        self._lock = threading.Lock()
        self._memories = 0
        self._closed = False
        self._failed = False  # it was left by an exception: what it leaves unsaid is no good end
        self._closer = 0  # the thread that closes: it alone may still wait
        self._life: LifeFile | None = None
        self.link = Link(directory, self._hello, self._greeted, self._lost, line)
        self.link.start()
        try:
            self.ledger = self._greet(deadline, start_broker)
        except BaseException:
            self.link.stop()
            if self._life is not None:
                self._life.remove()
            raise
        self._words = self.ledger.words
        self._at = self.ledger.block(self.block)
        self._taint, self._lease = self._at + Block.TAINT, self._at + Block.LEASE
        self.waits = WaitTable(self.ledger, self.block)
        stead = Stead(directory, self.ledger, self.link)
        self.suspect, self.finish_condemning, self.dead = stead.suspect, stead.finish_condemning, stead.dead

    def _greet(self, deadline: Deadline, start_broker: bool) -> Ledger:
        if start_broker:
            # Again and again: the one that runs may be about to leave with its last session.
            start_broker_in(self.runtime)
            while not self.link.welcomed.wait(deadline.left(0.1)) and deadline.left():
                start_broker_in(self.runtime)
        else:
            self.link.welcomed.wait(None if deadline.at is None else deadline.left(threading.TIMEOUT_MAX))
        if self.link.failure is not None:
            raise self.link.failure
        if self.link.ledger is None:
            raise errors.BrokerUnavailable(
                f"no broker answered {self._where()} within {deadline.timeout:g} s: start one with `ipcsync broker`, "
                "or connect(start_broker=True)"
            )
        return self.link.ledger

    def _where(self) -> str:
        line = self.link.line
        return f"in {self.runtime}" if line is None else f"at {line.endpoint} (with the public key {line.server})"

    # -- the greeting (the I/O thread)

    def _hello(self) -> wire.Hello:
        if self._life is None and not seen(self.runtime):
            self._life = LifeFile(self.runtime)  # the broker cannot see our process end: it looks at this file's lock
        return wire.Hello(
            protocol_min=wire.PROTOCOL_MIN,
            protocol_max=wire.PROTOCOL_MAX,
            layout=LAYOUT,
            version=__version__,
            name=self.name,
            namespace=self.namespace,
            pid=self._pid,
            start=self._start,
            boot_id=linux.boot_id(),
            pid_namespace=linux.pid_namespace(),
            uid=os.getuid(),
            session=self.number,
            lock=self._life.name if self._life is not None else "",
            held=[held for thing in list(self._adopted.values()) if (held := thing._held()) is not None],
        )

    def _greeted(self, welcome: wire.Welcome) -> Ledger:
        if self.boot and not (welcome.resumed and welcome.block == self.block):
            # The new broker does not know us: our cells and block are somebody else's now.
            raise errors.ResourceLost("the broker was restarted and could not take this session over: connect again")
        self.number, self.boot = welcome.session, welcome.boot
        if self.link.ledger is not None:
            return self.link.ledger
        self.block = welcome.block
        line = self.link.line
        try:
            found = Ledger.open(self.runtime / welcome.ledger)
        except FileNotFoundError:
            if line is None:
                raise
            raise elsewhere(line, self.runtime) from None
        if line is not None and found.boot != welcome.boot:
            found.region.close()
            raise elsewhere(line, self.runtime)
        return found

    def _lost(self, error: errors.IpcSyncError) -> None:
        self._refusal = self._refusal or error

    # -- what everything above is made of

    def check(self) -> None:
        """Raises why nothing can be done here: closed, forked, or taken for dead."""
        if self._refusal is not None and self._closer != threading.get_ident():
            raise type(self._refusal)(self._refusal.message, **self._refusal.fields)
        if self._words[self._lease]:
            raise errors.StaleHandle(
                "this process was stopped for longer than its lease and was taken for dead: connect again"
            )

    @property
    def taint(self) -> int:
        """How often device waits of this session were condemned."""
        return self._words[self._taint]

    def taint_error(self) -> errors.IpcSyncError:
        cell = self._words[self._at + Block.CULPRIT] - 1
        return verdict_error(self.ledger, cell, f"the event of cell {cell}, which a stream of this process waited for")

    def deadline(self, timeout: Timeout = UNSET) -> Deadline:
        """The deadline of a host wait: `timeout` in seconds, the session's default, or None."""
        if isinstance(timeout, Unset):
            timeout = self.default_timeout
        return Deadline(timeout)

    def request(self, op: str, body: Any, reply: type[S], deadline: Deadline) -> S:
        """A call to the broker; its error, or ``BrokerUnavailable`` at the deadline."""
        self.check()
        return self.link.call(op, body, reply, deadline)

    def stream(self, stream: object, device: Device) -> RawStream:
        """The raw stream of a ``stream=`` argument that must be of `device`."""
        if stream.__class__ is Stream and stream.device is device:
            return stream._raw
        return resolve(stream, device, streams=self.streams)

    def reading_stream(self, stream: object, device: Device) -> RawStream:
        """That of one which reads memory of `device`: of that device, unless the caller names another one's."""
        if stream is None or (stream.__class__ is Stream and stream.device is device):
            return self.stream(stream, device)
        return resolve_any(stream, device)

    def budget(self, backend: Backend, raw: RawStream) -> Budget | None:
        """The wait budget that a stream counts in."""
        return budget_of(backend, backend.stream_device(raw))

    def admit(
        self,
        backend: Backend,
        raw: RawStream,
        region: Region,
        index: int,
        value: int,
        deadline: Deadline,
        name: str,
        *,
        block: bool = True,
    ) -> bool:
        """Whether a wait for a word is to be put on the stream: not if it is reached meanwhile. Within the wait budget
        of this process and device; beyond it the caller is kept."""
        wait = region.words, index, value
        if reached(wait):
            return False
        budget = budget_of(backend, backend.stream_device(raw))
        return budget is None or budget.enter(
            backend.stream_key(raw),
            wait,
            deadline,
            name,
            block=block,
            check=self.check,
            waiting=(lambda: self.waits.host.of(BUDGET, self.ledger.cell_of(index), value, name))
            if region is self.ledger.region
            else None,
        )

    def enqueue_waits(
        self,
        backend: Backend,
        raw: RawStream,
        region: Region,
        waits: Sequence[tuple[int, int]],
        deadline: Deadline,
        name: str,
    ) -> None:
        """Makes the stream wait for words that order re-use and carry no data (LEDGER.md rule 6): (index, value) of
        each."""
        due = [each for each in waits if self.admit(backend, raw, region, *each, deadline, name)]
        if due:
            backend.wait_for_all(raw, region, due)

    @cached_property
    def waiter(self) -> Waiter:
        """Waits for this session's coroutines."""
        from .many import Waiter

        return Waiter()

    def condemn_own(self, timeline: Timeline, error: BaseException) -> None:
        """A stream of ours failed before a round that it was to complete."""
        self.link.post("condemn", wire.Condemn(incarnation=timeline.incarnation, reason=repr(error)[:4096]))

    def backend(self, device: str) -> tuple[Backend, int]:
        """The backend of a device as the wire names it ("cpu", or a GPU's UUID), and its ordinal here."""
        from .backends import select

        if device == "cpu":
            return select.backend("cpu"), 0
        cuda = select.backend("cuda")
        return cuda, cuda.index(device)

    def open_timeline(self, info: wire.EventInfo) -> Timeline:
        """The timeline of an event: the ledger made reachable for its device, its CUDA event opened from its handle.
        One a process, however often the event is opened, since its records are numbered under one lock."""
        with self._lock:
            key = (info.incarnation, info.cell)
            timeline = self._timelines.get(key)
            if timeline is None:
                timeline = self._timelines[key] = self._new_timeline(info)
            if info.handle and timeline.cuda_event is None:  # new, or closed before
                timeline.cuda_event = self._cuda_event(info)
            return timeline

    def _new_timeline(self, info: wire.EventInfo) -> Timeline:
        backend, index = self.backend(info.device)
        if backend not in self._registered:
            with backend.using(index):
                backend.register(self.ledger.region)
            self._registered.append(backend)
        backend.blocked_limit(index)  # probed before anything waits there
        return Timeline(
            self,
            backend,
            info.cell,
            info.incarnation,
            info.name,
            by_event=info.via == "cuda-event",
        )

    def _cuda_event(self, info: wire.EventInfo) -> Event:
        from .event import Event
        from .shared_event import device_of

        event = Event.from_ipc_handle(device_of(self, info.device), info.handle)
        event._handle = info.handle
        return event

    def map(self, file: str, *, writable: bool = True) -> Region:
        """Maps a file of the runtime directory."""
        return Region.open(self.runtime / file, writable=writable)

    def memory_name(self) -> str:
        """A new name for a file of session-owned memory, in this session's runtime directory."""
        self._memories += 1
        return str(self.runtime / f"smem-{self.number}-{self._memories}")

    def adopt(self, thing: Any) -> None:
        """`thing` is ended with the session: it has ``_shutdown(deadline)`` and ``_held()``."""
        with self._lock:
            self._adopted[id(thing)] = thing
            self._handles[thing._held()["incarnation"]] += 1

    def forget(self, thing: Any) -> bool:
        """`thing` has ended. Whether it was the last handle of its incarnation here, and so detaches."""
        incarnation = thing._held()["incarnation"]
        with self._lock:
            if self._adopted.pop(id(thing), None) is None:
                return False
            self._handles[incarnation] -= 1
            if self._handles[incarnation]:
                return False
            del self._handles[incarnation]
            return True

    def detach(self, incarnation: int, quiet: Callable[[], bool], deadline: Deadline) -> None:
        """Gives the incarnation back once none of this process's device work touches it: at once if `quiet()`, else
        when the I/O thread sees it so (LEDGER.md rule 1)."""
        body = wire.Detach(incarnation)
        if quiet():
            self.request("detach", body, wire.Empty, deadline)
        else:
            self.link.post_when(quiet, "detach", body)


def _program() -> str:
    """What this process is called where nobody gave it a name; short enough for a block of the ledger."""
    return os.path.basename(sys.argv[0]).encode("ascii", "replace").decode()[-50:] or "python"
