"""What the broker announces, for those who want to hear it: names that appear, and peers that die.

A session that asks starts one thread with a subscription of its own. Announcements are numbered over all namespaces, so
it subscribes to all of them: a gap, or another boot token, says that something was missed. Then a snapshot of the
namespace says which names there are. A snapshot cannot say who died meanwhile; whoever waits for the dead is told in
any case, by the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors, runtime, wire
from .ledger import Block
from .waiting import UNSET, Deadline, Timeout

if TYPE_CHECKING:
    from .session import Session

_SNAPSHOT = 5.0  # seconds that a broker has for a page of names
_DEATHS = {"died": "died", "silent": "was stopped for longer than its lease"}
LOG = logging.getLogger("ipcsync")


class Named(NamedTuple):
    """A name that can be opened. ``kind``: "event", "channel" or "array"."""

    kind: str
    name: str


class Log:
    """Which announcements were seen, and which names there are. No I/O.

    `take` gives the name that is new with an announcement, `merge` those of a snapshot; `missed`: a snapshot is due.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.boot, self.seq = b"", 0
        self.missed = True  # what came before us
        self.gaps = 0
        self._names: dict[str, int] = {}  # -> the newest incarnation seen

    def take(self, namespace: str, said: wire.Announcement) -> Named | None:
        if self.boot and (said.boot != self.boot or said.seq != self.seq + 1):
            self.missed = True
            self.gaps += 1
        self.boot, self.seq = said.boot, said.seq
        return self._created(said.body) if said.kind == "created" and namespace == self.namespace else None

    def merge(self, pages: list[dict[str, Any]]) -> list[Named]:
        return [named for body in pages if (named := self._created(body)) is not None]

    def _created(self, body: dict[str, Any]) -> Named | None:
        name, incarnation = body["name"], body["incarnation"]
        if incarnation <= self._names.get(name, 0):
            return None
        self._names[name] = incarnation
        return Named(body["kind"], name)


class Watch:
    """Made by ``session.watch``: yields each name once, and again when it is created anew.

    ``for named in watch`` and ``async for named in watch`` go on until ``close()``, or raise ``WaitTimeout`` when none
    came within `timeout` seconds; ``get`` takes one. A context manager.
    """

    def __init__(self, announcements: Announcements, pattern: str, timeout: Timeout) -> None:
        self.pattern, self.timeout = pattern, timeout
        self._announcements, self._session = announcements, announcements.session
        self._found: deque[Named] = deque()
        self._changed = threading.Condition()
        self._sleeper: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._closed = False

    def get(self, timeout: Timeout = UNSET) -> Named:
        """The next name; ``WaitTimeout`` when none came within `timeout` seconds, ``EndOfStream`` once closed."""
        deadline = self._session.deadline(timeout)
        with self._changed:
            while (named := self._next()) is None:
                left = deadline.left()
                if left == 0.0:
                    raise self._late(deadline)
                self._changed.wait(left)
        return named

    def _next(self) -> Named | None:
        if self._found:
            return self._found.popleft()
        if self._closed:
            raise errors.EndOfStream("this watch was closed: make another with session.watch()")
        self._session.check()
        return None

    def _late(self, deadline: Deadline) -> errors.WaitTimeout:
        return errors.WaitTimeout(
            f"no name like {self.pattern!r} appeared within {deadline.timeout:g} s", timeout=deadline.timeout
        )

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Named:
        try:
            return self.get(self.timeout)
        except errors.EndOfStream:
            raise StopIteration from None

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Named:
        deadline = self._session.deadline(self.timeout)
        loop = asyncio.get_running_loop()
        while True:
            future: asyncio.Future[None] = loop.create_future()
            with self._changed:
                try:
                    named = self._next()
                except errors.EndOfStream:
                    raise StopAsyncIteration from None
                if named is not None:
                    return named
                self._sleeper = loop, future
            try:
                async with asyncio.timeout(None if deadline.at is None else deadline.left(1e9)):
                    await future
            except TimeoutError:
                raise self._late(deadline) from None

    def close(self) -> None:
        """Ends it: whoever iterates over it is done. What was found already is still given."""
        self._announcements.watches.discard(self)
        self._closed = True
        self.wake()

    def offer(self, named: Named) -> None:
        if fnmatchcase(named.name, self.pattern):
            self._found.append(named)
            self.wake()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            loop, future = sleeper

            def rouse() -> None:
                if not future.done():  # else cancelled, or late
                    future.set_result(None)

            try:
                loop.call_soon_threadsafe(rouse)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Announcements(threading.Thread):
    """A session's subscription. It starts with the first who asks and ends with the session."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="ipcsync-announcements", daemon=True)
        self.session = session
        self.watches: set[Watch] = set()
        self.callbacks: list[Callable[[errors.PeerDied], object]] = []
        self.log = Log(session.namespace)
        self._lock = threading.Lock()
        self._listens = threading.Event()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.start()
        self._listens.wait()

    def watch(self, pattern: str, timeout: Timeout) -> Watch:
        if not isinstance(pattern, str) or not pattern:
            raise errors.InvalidArgument(f'{pattern!r} is no pattern: give a name with * and ?, such as "requests.*"')
        made = Watch(self, pattern, timeout)
        with self._lock:  # until the thread has heard something, it may be deaf still: what it missed comes with a tick
            pages = self._pages()
            self._offer(self.log.merge(pages))
            self.watches.add(made)
            for body in pages:
                made.offer(Named(body["kind"], body["name"]))
        return made

    def _offer(self, found: list[Named]) -> None:
        for watch in list(self.watches):
            for named in found:
                watch.offer(named)

    def on_peer_died(self, callback: Callable[[errors.PeerDied], object]) -> Callable[[], None]:
        self.callbacks.append(callback)

        def remove() -> None:
            if callback in self.callbacks:
                self.callbacks.remove(callback)

        return remove

    def stop(self) -> None:
        try:
            os.eventfd_write(self._bell, 1)
        except OSError:
            return  # the thread has ended
        if threading.current_thread() is not self:  # a callback may close its session
            self.join(5.0)

    def run(self) -> None:
        import zmq

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            socket.subscribe(b"")
            socket.connect(runtime.announce_endpoint(self.session.runtime))
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._bell, zmq.POLLIN)
            self._listens.set()
            while True:
                ready = dict(poller.poll())
                if self._bell in ready:
                    return
                self._take(socket.recv_multipart())
        finally:
            self._listens.set()
            for watch in list(self.watches):
                watch.wake()
            socket.close(0)
            context.term()
            os.close(self._bell)

    def _take(self, frames: list[bytes]) -> None:
        try:
            namespace, message = frames
            said = wire.decode(message, wire.Announcement)
            space = namespace.decode()
        except (ValueError, errors.BadMessage):
            return
        with self._lock:
            new = self.log.take(space, said)
            self.session.ledger.words[self.session._at + Block.GAPS] = self.log.gaps
            self._offer([new] if new is not None else [])
            if self.log.missed:
                try:
                    self._offer(self.log.merge(self._pages()))
                    self.log.missed = False
                except errors.IpcSyncError:
                    pass  # no broker, or none that answers: the next announcement asks again
        if said.kind == "session" and space == self.session.namespace and said.body.get("state") in _DEATHS:
            self._mourn(said.body)

    def _pages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after, more = "", True
        while more:
            page = self.session.request("snapshot", wire.Snapshot(after), wire.SnapshotReply, Deadline(_SNAPSHOT))
            found += page.created
            more = page.more
            after = found[-1]["name"] if found else ""
        return found

    def _mourn(self, body: dict[str, Any]) -> None:
        name, pid = body["name"], body["pid"]
        died = errors.PeerDied(
            f"session {name!r} (pid {pid}) {_DEATHS[body['state']]}: what it had not finished will not be true",
            session=name,
            pid=pid,
            round=None,
            name=None,
        )
        for callback in list(self.callbacks):
            try:
                callback(died)
            except Exception:  # a mistake of the caller's: the next one is told all the same
                LOG.exception("on_peer_died: the callback %r raised", callback)
