"""A session: one process's membership of a broker, and everything it creates or opens there.

``connect()`` greets the broker, maps the ledger and registers for membarrier. From then on the broker is not on the hot
path: events, channels and arrays work on the shared pages, and only creating, opening, joining and leaving are calls.
Any thread may use a session; a forked child may not.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import weakref
from collections import Counter
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from . import __version__, condemn, config, errors, failpoints, linux, runtime, wire
from .budget import budget_of, reached
from .host_waits import BUDGET
from .ledger import LAYOUT, Block, Cell, Header, Ledger
from .life import LifeFile, seen
from .link import Link
from .shm import Region
from .stream import Stream, resolve, resolve_any
from .timeline import Timeline, verdict_error
from .wait_table import WaitTable
from .waiting import UNSET, Deadline, Timeout, Unset, wait_word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .announcements import Announcements, Watch
    from .backends.base import Backend, RawStream
    from .budget import Budget
    from .channel import Channel
    from .channel_reader import Reader
    from .device import Device
    from .event import Event
    from .fields import Field
    from .keys import Line
    from .many import Waiter
    from .shared_array import SharedArray
    from .shared_event import EventRef, SharedEvent
    from .trace import Trace

S = TypeVar("S")
BACKLOG = 1.0  # seconds at most that close() waits for streams to come past what they were made to wait for

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,120}")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_suspecting = threading.Lock()  # the broker's lock is the process's, not the thread's


def check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise errors.InvalidArgument(f"{name!r} is no name: 1 to 120 of A-Z a-z 0-9 _ . -")


def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    namespace: str | None = None,
    start_broker: bool = False,
    streams: Literal["torch", "cupy"] | None = None,
    timeout: float | None = 5.0,
    default_timeout: float | None = 30.0,
    manage_env: bool = True,
) -> Session:
    """Connects to the broker of a runtime directory and returns a :class:`Session` (a context manager).

    `endpoint`: the runtime directory, ``ipc://DIRECTORY/broker.sock``, or ``tcp://HOST:PORT`` of a broker on this
    machine that was started with ``--tcp`` and allows our key (``ipcsync keys``); else ``$IPCSYNC_RUNTIME_DIR``, else
    ``/dev/shm/ipcsync-<uid>``. `namespace` (``$IPCSYNC_NAMESPACE``, else "default") is where its names live.
    `start_broker`: start one that leaves with its last session, if none runs. `streams`: whose current stream
    ``stream=None`` means where torch and CuPy are both loaded. `timeout`: seconds for connecting. `default_timeout`:
    seconds of every host wait that names none; None is no deadline, and safe, because death ends the wait.
    `manage_env`: set ``CUDA_DEVICE_MAX_CONNECTIONS=32`` if CUDA has not started (see the wait budget).

    Raises ``BrokerUnavailable`` when none answers, ``PermissionDenied`` when it does not let us in, and
    ``ProtocolMismatch`` when it speaks no version of ours.
    """
    namespace = namespace or config.value("namespace")
    check_name(namespace)
    if name is not None and (not isinstance(name, str) or not 1 <= len(name.encode()) <= 64):
        raise errors.InvalidArgument(f"name={name!r}: a session's name is a text of 1 to 64 bytes")
    if streams not in (None, "torch", "cupy"):
        raise errors.InvalidArgument(f'streams={streams!r}: "torch", "cupy" or None')
    if manage_env:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    line = _line(endpoint, start_broker=start_broker)
    directory = _directory(endpoint, create=start_broker) if line is None else _shared(line)
    linux.membarrier_register()
    linux.membarrier()
    return Session(directory, name, namespace, streams, Deadline(timeout), default_timeout, line, start_broker)


def _start_broker(directory: Path) -> None:
    """Starts a broker if none runs."""
    if runtime.broker_pid(directory) is None:
        from importlib import import_module

        try:
            import_module("ipcsync_broker.launch").start(directory, linger=True)
        except errors.BrokerRunning:
            pass  # somebody else was faster


def _line(endpoint: str | os.PathLike[str] | None, *, start_broker: bool) -> Line | None:
    """The keys for a ``tcp://`` endpoint; None for the others."""
    if endpoint is None or not os.fspath(endpoint).startswith("tcp://"):
        return None
    if start_broker:
        raise errors.InvalidArgument("a broker at tcp:// is not started by a client: `ipcsync broker --tcp ENDPOINT`")
    from .keys import line

    return line(os.fspath(endpoint))


def _shared(line: Line) -> Path:
    """The runtime directory, which a client over tcp has in common with the broker: its memory is there."""
    try:
        return runtime.directory(create=False)
    except errors.BrokerUnavailable as error:
        raise _elsewhere(line, str(error.fields.get("path"))) from None


def _elsewhere(line: Line, directory: object) -> errors.Unsupported:
    return errors.Unsupported(
        f"{line.endpoint}: the broker's memory is not in {directory}. A session over tcp runs on the broker's machine "
        "and shares its /dev/shm: set IPCSYNC_RUNTIME_DIR to the broker's runtime directory"
    )


def _directory(endpoint: str | os.PathLike[str] | None, *, create: bool) -> Path:
    if endpoint is None:
        return runtime.directory(create=create)
    text = os.fspath(endpoint)
    if text.startswith("ipc://"):
        text = os.path.dirname(text.removeprefix("ipc://"))
    return runtime.directory(Path(text), create=create)


class Session:
    """Made by :func:`connect`. ``close()`` (or leaving the ``with`` block) ends it and everything it opened."""

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
        _sessions.add(self)

    def _greet(self, deadline: Deadline, start_broker: bool) -> Ledger:
        if start_broker:
            # Again and again: the one that runs may be about to leave with its last session.
            _start_broker(self.runtime)
            while not self.link.welcomed.wait(deadline.left(0.1)) and deadline.left():
                _start_broker(self.runtime)
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
            raise _elsewhere(line, self.runtime) from None
        if line is not None and found.boot != welcome.boot:
            found.region.close()
            raise _elsewhere(line, self.runtime)
        return found

    def _lost(self, error: errors.IpcSyncError) -> None:
        self._refusal = self._refusal or error

    # -- what everything above is made of

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

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

    def enqueue_wait(
        self, backend: Backend, raw: RawStream, region: Region, index: int, value: int, deadline: Deadline, name: str
    ) -> None:
        """Makes the stream wait for a word that orders re-use and carries no data (LEDGER.md rule 6)."""
        if backend.is_thread(raw):
            wait_word(region, index, value, deadline, check=self.check, what=lambda: f"round {value} of {name!r}")
        elif self.admit(backend, raw, region, index, value, deadline, name):
            backend.wait(raw, region, index, value)

    def condemn_own(self, timeline: Timeline, error: BaseException) -> None:
        """A stream of ours failed before a round that it was to complete."""
        self.link.post("condemn", wire.Condemn(incarnation=timeline.incarnation, reason=repr(error)[:4096]))

    def suspect(self, block: int) -> bool:
        """A waiter saw that the owner of this block is dying. The broker sees it too; without one, we condemn in its
        stead. False when nobody does: the broker is there, but its loop stands still."""
        return self._in_the_brokers_stead(lambda: self._condemn_dead(block))

    def finish_condemning(self) -> None:
        """A condemnation is under way. Should its author have died in it, a waiter as we are, and no broker be there,
        it is completed here: else nobody would condemn the rest of the chain, or let go who waits for the dead."""
        if self._words[Header.CONDEMNING] & 1:
            self._in_the_brokers_stead(self._finish_begun)

    def _in_the_brokers_stead(self, condemn: Callable[[], None]) -> bool:
        """Condemns with the broker's lock held, so that nobody else does, if no broker is there."""
        if not _suspecting.acquire(blocking=False):
            return True  # another thread is at it
        try:
            if runtime.broker_pid(self.runtime) is not None:
                return self.link.alive()
            lock = runtime.Lock(self.runtime)
            try:
                lock.acquire()
            except errors.BrokerRunning:
                return True
            try:
                condemn()
            finally:
                lock.release()
            return True
        finally:
            _suspecting.release()

    def _condemn_dead(self, block: int) -> None:
        if not self.ledger.dying(block):
            return
        who = condemn.Culprit(Cell.DIED, *self._owner(block))
        condemn.finish_begun(self.ledger, who)
        condemn.condemn(self.ledger, condemn.recorded_by(self.ledger, block), who, failpoint=failpoints.hit)

    def _finish_begun(self) -> None:
        for block in range(self.ledger.sessions):
            self._condemn_dead(block)
        condemn.finish_begun(self.ledger, condemn.Culprit(Cell.DIED))

    def _owner(self, block: int) -> tuple[int, int, str]:
        """(session, pid, name) of whose block it is."""
        at = self.ledger.block(block)
        words = self._words
        return words[at + Block.SESSION], words[at + Block.PID], self.ledger.read_text(at + Block.NAME)

    def dead(self, block: int, name: str, round: int) -> errors.PeerDied:
        """What a waiter raises that sees its recorder dead, where no verdict will come."""
        _, pid, who = self._owner(block)
        return errors.PeerDied(
            f"session {who!r} (pid {pid}) died, and the broker does not answer: round {round} of {name!r} will not be "
            "true; restart the broker",
            session=who,
            pid=pid,
            round=round,
            name=name,
        )

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

    # -- shared events

    def create_event(
        self,
        name: str,
        *,
        device: object = None,
        via: Literal["auto", "timeline", "cuda-event"] = "auto",
        exist_ok: bool = False,
        lifetime: Literal["session", "broker"] = "session",
        timeout: Timeout = UNSET,
    ) -> SharedEvent:
        """Has the broker create the event `name` and publish its handle; opens it here.

        `device`: whose streams record and wait on it; None is the accelerator if there is one, else the CPU. `via`: how
        streams wait on cuda; see :class:`SharedEvent`. Raises ``NameInUse`` (unless `exist_ok` and the specification is
        equal) and ``QuotaExceeded``.
        """
        from .shared_event import create_event

        return create_event(self, name, device=device, via=via, exist_ok=exist_ok, lifetime=lifetime, timeout=timeout)

    def open_event(self, name: str, *, timeout: Timeout = UNSET) -> SharedEvent:
        """Opens the event `name`, waiting until it is published; ``NotFound`` at the deadline."""
        from .shared_event import open_event

        return open_event(self, name, timeout)

    def wait(self, ref: EventRef | bytes, stream: object = None, *, timeout: Timeout = UNSET) -> None:
        """Makes the stream wait for the round that `ref` names, opening its event if need be."""
        from .shared_event import wait_ref

        wait_ref(self, ref, stream, timeout)

    # -- waiting for many

    def select(self, readers: Sequence[Reader], timeout: Timeout = UNSET) -> list[Reader]:
        """Those of the channels' `readers` whose ``get()`` would find an item, or raise what ended their stream: waits
        until there is one, for one worker of several channels. An empty list when `timeout` seconds have passed.

        Give ``get()`` a timeout where a reader has ``on_writer_death="wait"``: the item may be condemned in between."""
        from .many import select

        return select(self, readers, timeout)

    @cached_property
    def waiter(self) -> Waiter:
        """Waits for this session's coroutines."""
        from .many import Waiter

        return Waiter()

    # -- what the broker announces

    @cached_property
    def _announcements(self) -> Announcements:
        from .announcements import Announcements

        self.check()
        return Announcements(self)

    def watch(self, pattern: str, *, timeout: Timeout = UNSET) -> Watch:
        """Names of events, channels and arrays like `pattern` (``*``, ``?``, ``[...]``), there now or appearing later::

            for kind, name in session.watch("requests.*", timeout=None):
                serve(session.open_channel(name))

        An iterator for ``for`` and ``async for``, and a context manager. `timeout`: seconds for each next name, else
        ``WaitTimeout``. A name that was created anew comes again.
        """
        return self._announcements.watch(pattern, timeout)

    def on_peer_died(self, callback: Callable[[errors.PeerDied], object]) -> Callable[[], None]:
        """Calls ``callback(error)`` when a session of this namespace died, or was stopped for longer than its lease;
        `error` has its ``session`` name and ``pid``. Returns a call that ends it.

        It runs on a thread of the session's own: be brief. Deaths that the broker tells while announcements are lost
        (it was restarted, or this process stood still) are not called; who waits for the dead is told in any case.
        """
        return self._announcements.on_peer_died(callback)

    def stats(self) -> dict[str, int]:
        """Counts of this session: ``open`` handles, device ``waits`` outstanding, long host waits that ``came``,
        ``timed_out`` or ``ended`` otherwise, ``condemned`` device waits, and ``announcement_gaps``."""
        from .host_waits import OUTCOMES

        words, at = self._words, self._at
        return {
            "open": len(self._adopted),
            "waits": sum(1 for _ in self.ledger.waits(self.block)),
            **{name: words[at + Block.COUNTS + i] for i, name in OUTCOMES.items()},
            "condemned": self.taint,
            "announcement_gaps": words[at + Block.GAPS],
        }

    # -- channels and arrays

    def create_channel(self, name: str, **options: Any) -> Channel:
        """Creates a ring of buffers; see :func:`ipcsync.channel.create_channel` for the options."""
        from .channel import create_channel

        return create_channel(self, name, **options)

    def open_channel(self, name: str, *, timeout: Timeout = UNSET) -> Channel:
        """Opens the channel `name`, waiting until it is published; ``NotFound`` at the deadline."""
        from .channel import open_channel

        return open_channel(self, name, timeout=timeout)

    def share(self, name: str, arrays: object, **options: Any) -> SharedArray:
        """Shares memory that the caller owns: one array, or a dict of them under one name."""
        from .sharing import share

        return share(self, name, arrays, **options)

    def create_array(self, name: str, fields: Mapping[str, Field] | None = None, **options: Any) -> SharedArray:
        """Creates a shared array whose memory the broker owns."""
        from .sharing import create_array

        return create_array(self, name, fields, **options)

    def open_array(self, name: str, *, timeout: Timeout = UNSET) -> SharedArray:
        """Opens the shared array `name`, waiting until it is published; ``NotFound`` at the deadline."""
        from .sharing import open_array

        return open_array(self, name, timeout=timeout)

    def unlink(self, name: str, *, timeout: Timeout = UNSET) -> None:
        """Removes the name; whoever has it open keeps it."""
        check_name(name)
        self.request("unlink", wire.Unlink(name), wire.Empty, self.deadline(timeout))

    def trace(self, out: str | os.PathLike[str]) -> Trace:
        """Records what this process waits for, holds and hands on, from now until ``close()`` (or the end of a ``with``
        block) writes it to `out`: a Chrome trace, for Perfetto or ``ipcsync trace summary``. One at a time."""
        from .trace import Trace

        return Trace(out, self.name)

    # -- the end

    def close(self, timeout: Timeout = UNSET) -> None:
        """Ends everything this session opened, drains what it issued within `timeout` seconds, and says goodbye.

        Whoever waits in another thread gets ``SessionClosed``. What is not drained by then is treated as a death.
        """
        if self._closed or isinstance(self._refusal, errors.ForkedProcess):
            return
        self._closed, self._closer = True, threading.get_ident()
        over = errors.SessionClosed("the session was closed: connect again")
        self._refusal = over  # whoever waits in another thread sees it within a slice
        self.link.hasty = True
        self.link.dismiss(over)
        try:
            self._end(self.deadline(timeout))
        finally:
            self._closer = 0
            self._adopted.clear()
            if "_announcements" in self.__dict__:
                self._announcements.stop()
            self.link.stop()

    def _end(self, deadline: Deadline) -> None:
        for thing in reversed(list(self._adopted.values())):
            try:
                thing._shutdown(deadline)
            except errors.IpcSyncError:
                pass  # it is dead or lost already, or did not drain: the broker frees what is left of it
        self.link.settle(Deadline(deadline.left(BACKLOG)))
        for timeline in list(self._timelines.values()):
            if not timeline.quiet():
                timeline.hold()
        try:
            self.link.call("bye", wire.Bye(), wire.Empty, Deadline(min(5.0, max(0.5, deadline.left(5.0)))))
        except errors.IpcSyncError:
            pass  # no broker: the next one finds our life word let go
        if not self.waits.outstanding():
            for backend in self._registered:
                backend.unregister(self.ledger.region)
            if self._life is not None:
                self._life.remove()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise errors.InvalidState(
            "a session, and what it opened, belongs to its process: pass names, and connect() and open them there"
        )

    def __repr__(self) -> str:
        return f"<ipcsync.Session {self.name!r} in {self.runtime}{' (closed)' if self._closed else ''}>"


def _program() -> str:
    """What this process is called where nobody gave it a name; short enough for a block of the ledger."""
    return os.path.basename(sys.argv[0]).encode("ascii", "replace").decode()[-50:] or "python"


def _after_fork() -> None:
    for session in list(_sessions):
        session._refusal = errors.ForkedProcess(
            "this session was opened before a fork: CUDA and ZeroMQ do not survive one. Start children with the spawn "
            'method (multiprocessing.get_context("spawn")) and connect() in them'
        )


def _at_exit() -> None:
    for session in list(_sessions):
        session.close(timeout=2.0)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
