"""A session: one process's membership of a broker, and everything it creates or opens there.

``connect()`` greets the broker, maps the ledger and registers for membarrier. From then on the broker is not on the hot
path: events, channels and arrays work on the shared pages, and only creating, opening, joining and leaving are calls.
Any thread may use a session; a forked child may not.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import weakref
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from . import config, endpoints, errors, linux, queues, wire
from .ledger import Block
from .session_core import SessionCore
from .waiting import UNSET, Deadline, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .announcements import Announcements, Watch
    from .channel import Channel
    from .channel_reader import Reader
    from .fields import Field
    from .shared_array import SharedArray
    from .shared_event import EventRef, SharedEvent
    from .trace import Trace

BACKLOG = 1.0  # seconds at most that close() waits for streams to come past what they were made to wait for

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,120}")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


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
    `manage_env`: set ``CUDA_DEVICE_MAX_CONNECTIONS`` if CUDA has not started: 32, or 8 under MPS (see the wait budget).

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
        queues.ask(os.environ)
    line = endpoints.line_of(endpoint, start_broker=start_broker)
    if line is None:
        directory = endpoints.directory_of(endpoint, create=start_broker)
    else:
        directory = endpoints.shared_directory(line)
    linux.membarrier_register()
    linux.membarrier()
    session = Session(directory, name, namespace, streams, Deadline(timeout), default_timeout, line, start_broker)
    _sessions.add(session)
    return session


class Session(SessionCore):
    """Made by :func:`connect`. ``close()`` (or leaving the ``with`` block) ends it and everything it opened."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

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
        self._failed = kind is not None
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise errors.InvalidState(
            "a session, and what it opened, belongs to its process: pass names, and connect() and open them there"
        )

    def __repr__(self) -> str:
        return f"<ipcsync.Session {self.name!r} in {self.runtime}{' (closed)' if self._closed else ''}>"


def _after_fork() -> None:
    for session in list(_sessions):
        things = list(session._adopted.values())
        session._refusal = errors.ForkedProcess(
            "this session was opened before a fork: CUDA and ZeroMQ do not survive one. Start children with the spawn "
            'method (multiprocessing.get_context("spawn")) and connect() in them'
        )
        # A block that the child leaves as well releases its slot, closes its reader: those are the parent's.
        for thing in (session.ledger, *(thing.control for thing in things if hasattr(thing, "control"))):
            thing.region.part()


def _but_for_the_exit(hook: Callable[[threading.ExceptHookArgs], object]) -> Callable[[threading.ExceptHookArgs], None]:
    """`hook`, which prints what a thread did not catch; but not that a daemon thread's wait was ended by the end of the
    program, which is how such threads end."""

    def quiet(args: threading.ExceptHookArgs) -> None:
        over = issubclass(args.exc_type, errors.SessionClosed) and args.thread is not None and args.thread.daemon
        if not over:
            hook(args)

    return quiet


def _at_exit() -> None:
    if _sessions:
        threading.excepthook = _but_for_the_exit(threading.excepthook)
    for session in list(_sessions):
        session.close(timeout=2.0)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
