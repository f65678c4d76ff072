"""The client's line to the broker: one I/O thread that owns the socket, and calls from any other thread.

It says hello, holds the session's robust life word (so its end is the session's death), beats in a word of the ledger,
and matches replies to calls. It notices a broker that was restarted, since every reply and the ledger's header carry
the broker's boot token. Then it says hello again, with what the session holds, after a jittered pause; calls that were
under way are sent again.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from . import errors, linux, runtime, wire
from .ledger import Block, Header, Ledger
from .waiting import Deadline

if TYPE_CHECKING:
    from .keys import Line

S = TypeVar("S")
BEAT = 1.0
GRACE = 0.5  # seconds that a broker gets beyond a call's deadline to say why it failed
BACK_OFF = 0.3  # up to this long a session waits before it greets a restarted broker: they all come at once
LOOK = 0.02  # between looks whether what is to be posted later can be
AGAIN = 1.0  # a hello that a living broker did not answer for so long was lost with the one before it
LOST = 10.0  # a call without a deadline gives up after no broker was there for so long
STALLED = 1_000_000_000  # nanoseconds without a turn of its loop after which a broker is not counted on


class _Call:
    __slots__ = ("body", "done", "id", "op", "posted", "reply", "until")

    def __init__(self, id: int, op: str, body: msgspec.Struct, until: float | None, *, posted: bool = False) -> None:
        self.id, self.op, self.until, self.posted = id, op, until, posted
        self.body = msgspec.to_builtins(body, builtin_types=(bytes,))
        self.done = threading.Event()
        self.reply: wire.Reply | errors.IpcSyncError | None = None

    def answer(self, reply: wire.Reply | errors.IpcSyncError) -> None:
        self.reply = reply
        self.done.set()

    def frame(self) -> bytes:
        left = None if self.until is None else max(0.0, self.until - time.monotonic())
        return wire.encode(wire.Request(wire.PROTOCOL_MAX, self.id, self.op, self.body, left))


class Link(threading.Thread):
    """`hello` makes the greeting anew each time; `greeted(welcome)` is told of each that was answered and gives the
    ledger; `lost(error)` is told that the session has ended without having been closed."""

    def __init__(
        self,
        directory: Path,
        hello: Callable[[], wire.Hello],
        greeted: Callable[[wire.Welcome], Ledger],
        lost: Callable[[errors.IpcSyncError], None],
        line: Line | None = None,
    ) -> None:
        super().__init__(name="ipcsync-link", daemon=True)
        self.directory, self.line = directory, line
        self._hello, self._greeted, self._lost = hello, greeted, lost
        self._ids = 0
        self._calls: dict[int, _Call] = {}  # without an answer yet
        self._outbox: deque[_Call] = deque()
        self._later: list[tuple[Callable[[], bool], str, msgspec.Struct]] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False  # not before: another file would get its number
        self._ending = False
        self._ended: errors.IpcSyncError | None = None
        self._greeting: _Call | None = None
        self._pulse: zmq.Socket[bytes] | None = None
        self._greet_at = self._greeted_at = 0.0
        self._life = self._at = self._number = 0
        self.boot = b""
        self.ledger: Ledger | None = None
        self.welcomed = threading.Event()  # or refused: then there is a failure
        self.failure: errors.IpcSyncError | None = None
        self.hasty = False  # the session is closing: a broker that is not there is not waited for

    # -- any thread

    def call(self, op: str, body: msgspec.Struct, reply: type[S], deadline: Deadline) -> S:
        """A request and its answer, typed; the broker's error, or ``BrokerUnavailable`` at the deadline."""
        call = self._queue(op, body, deadline.at)
        try:
            self._await(call, deadline)
        finally:
            with self._lock:
                self._calls.pop(call.id, None)
        if isinstance(call.reply, errors.IpcSyncError):
            raise call.reply
        if call.reply is None:
            raise errors.BrokerUnavailable(
                f"no broker answered {op!r} in time: is one running in {self.directory}? Attached work goes on"
            )
        if not call.reply.ok:
            wire.raise_failure(call.reply.error or wire.Failure("error", "the broker gave no reason"))
        return wire.convert(call.reply.body, reply)

    def post(self, op: str, body: msgspec.Struct) -> None:
        """Sends a request whose answer nobody waits for. It is sent again to a restarted broker, as calls are."""
        try:
            self._queue(op, body, None, posted=True)
        except errors.IpcSyncError:
            pass  # the session has ended, and with it what this was about

    def post_when(self, ready: Callable[[], bool], op: str, body: msgspec.Struct) -> None:
        """Posts the request once `ready()`, which must not block, is true; the I/O thread looks."""
        self._later.append((ready, op, body))
        self._ring()

    def soon(self, call: Callable[[], None]) -> None:
        """Has the I/O thread call it, which must not block. Takes no lock: the garbage collector may come in anywhere,
        and use this."""
        self._soon.append(call)
        self._ring()

    def settle(self, deadline: Deadline) -> None:
        """Waits until all that is to be posted later was posted."""
        while self._later and deadline.left() > 0.0 and self._ended is None:
            time.sleep(0.002)

    def alive(self) -> bool:
        """Whether there is a broker and its loop turned within the last second."""
        if runtime.broker_pid(self.directory) is None:
            return False
        return self.ledger is None or time.monotonic_ns() - self.ledger.words[Header.TICK] < STALLED

    def dismiss(self, error: errors.IpcSyncError) -> None:
        """Answers every call under way with `error`."""
        with self._lock:
            for call in list(self._calls.values()):
                if not call.posted:
                    del self._calls[call.id]
                    call.answer(error)

    def stop(self) -> None:
        """Ends the thread; its life word is unlocked, so it is no death."""
        self._ending = True
        self._ring()
        self.join(5.0)

    def _queue(self, op: str, body: msgspec.Struct, until: float | None, *, posted: bool = False) -> _Call:
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._ids += 1
            call = self._calls[self._ids] = _Call(self._ids, op, body, until, posted=posted)
            if len(call.frame()) > wire.MAX_MESSAGE:
                del self._calls[call.id]
                raise errors.InvalidArgument(
                    f"this {op} would be a message of more than {wire.MAX_MESSAGE} bytes: use fewer or smaller fields"
                )
            self._outbox.append(call)
        self._ring()
        return call

    def _await(self, call: _Call, deadline: Deadline) -> None:
        gone_since: float | None = None
        while True:
            now = time.monotonic()
            slice = 0.05 if self.hasty else 0.5
            if deadline.at is not None:
                slice = min(slice, deadline.at - now if now < deadline.at else deadline.at + GRACE - now)
            if call.done.wait(max(0.0, slice)):
                return
            now = time.monotonic()
            alive = self.alive()
            gone_since = None if alive else gone_since or now
            if deadline.at is None:
                late = gone_since is not None and now - gone_since > LOST
            else:
                late = now >= deadline.at + (GRACE if alive else 0.0)
            if late or (self.hasty and not alive):
                return

    def _ring(self) -> None:
        try:
            os.eventfd_write(self._bell, 1)
        except OSError:
            pass  # nobody has read it for long: the thread has ended

    # -- the I/O thread

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        dealer = context.socket(zmq.DEALER)
        refused: zmq.Socket[bytes] | None = None
        ended: errors.IpcSyncError = errors.SessionClosed("the session was closed: connect again")
        try:
            dealer.setsockopt(zmq.LINGER, 200)
            dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
            dealer.setsockopt(zmq.RECONNECT_IVL, 50)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            if self.line is None:
                dealer.connect(runtime.broker_endpoint(self.directory))
            else:
                self.line.secure(dealer)
                refused = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
                dealer.connect(self.line.endpoint)
            self._loop(dealer, refused)
        except errors.IpcSyncError as error:
            ended = error
        except BaseException as error:
            ended = errors.IpcSyncError(f"the session's I/O thread failed ({error!r}): connect again")
            raise
        finally:
            if not self._ending:
                self.failure = ended
                self._lost(ended)
            elif self._life:
                linux.robust_unlock(self._life)
            with self._lock:
                self._ended = ended
                calls = list(self._calls.values())
            for call in calls:
                call.answer(ended)
            self.welcomed.set()
            if refused is not None:
                dealer.disable_monitor()
                refused.close()
            if self._pulse is not None:
                self._pulse.close()
            dealer.close()
            context.term()

    def _loop(self, dealer: zmq.Socket[bytes], refused: zmq.Socket[bytes] | None) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        if refused is not None:
            poller.register(refused, zmq.POLLIN)
        beat_at = 0.0
        self._greet(dealer)
        while not self._ending or self._outbox:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + BEAT
                self._beat(now)
            if self._greet_at and now >= self._greet_at:
                self._greet(dealer)
            if not self._greeting:
                while self._outbox:
                    self._send(dealer, self._outbox.popleft())
            elif self._ending:
                return
            if self._later:
                self._look()
            wake = min(beat_at, self._greet_at or beat_at, now + LOOK if self._later else beat_at)
            ready = dict(poller.poll(max(0, int((wake - time.monotonic()) * 1000) + 1)))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            while self._soon:
                self._soon.popleft()()
            if dealer in ready:
                self._receive(dealer)
            if refused is not None and refused in ready:
                refused.recv_multipart()
                self._refused()

    def _refused(self) -> None:
        """The broker does not allow our key. It ends what has not begun; a session that stands goes on without it."""
        if self.line is not None and not self.boot:
            raise errors.PermissionDenied(
                f"the broker at {self.line.endpoint} does not allow the key {self.line.public}: let it in there with "
                f"`ipcsync keys allow NAME {self.line.public}`"
            )

    def _look(self) -> None:
        for entry in [entry for entry in self._later if entry[0]()]:
            self.post(entry[1], entry[2])
            self._later.remove(entry)

    def _beat(self, now: float) -> None:
        """Says that we live, in a word that the broker reads: it costs a busy broker nothing. And looks whether the
        broker is another one."""
        if self._greeting is not None:
            if now - self._greeted_at > AGAIN and runtime.broker_pid(self.directory) is not None:
                self._greet_at = now
            return
        assert self.ledger is not None
        if self.ledger.words[self._at + Block.SESSION] == self._number:
            self.ledger.words[self._at + Block.BEAT] += 1
        self._same_boot(b"" if self.ledger.region.replaced() else self.ledger.boot)

    def _send(self, dealer: zmq.Socket[bytes], call: _Call) -> None:
        try:
            dealer.send(call.frame(), zmq.NOBLOCK)
        except zmq.Again:
            pass  # a thousand messages are queued for a broker that is not there: the next one is sent this anew

    def _greet(self, dealer: zmq.Socket[bytes]) -> None:
        """Says hello, or says it again under the same number: what answers both counts once."""
        with self._lock:
            if self._greeting is None:
                self._ids += 1
            id = self._ids if self._greeting is None else self._greeting.id
        hello = self._hello()
        if hello.lock and self._pulse is None:
            self._pulse = self._beside(dealer.context, hello.lock)
        self._greeting = _Call(id, "hello", hello, None)
        self._greet_at, self._greeted_at = 0.0, time.monotonic()
        self._send(dealer, self._greeting)

    def _beside(self, context: zmq.Context[zmq.Socket[bytes]], lock: str) -> zmq.Socket[bytes]:
        """A connection that nothing is said over: the broker, which cannot see our process, sees by libzmq's heartbeats
        that it is not stopped, even while Python's lock is held for long."""
        made = context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.PROBE_ROUTER, 1)
        made.setsockopt(zmq.ROUTING_ID, lock.encode())
        made.setsockopt(zmq.RECONNECT_IVL, 50)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        made.connect(runtime.pulse_endpoint(self.directory))
        return made

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = wire.decode(frame, wire.Reply)
            except errors.BadMessage:
                continue
            if self._greeting is not None and reply.id == self._greeting.id:
                self._welcome(reply)
            elif self._same_boot(reply.boot):
                with self._lock:
                    call = self._calls.pop(reply.id, None)
                if call is not None:
                    call.answer(reply)

    def _welcome(self, reply: wire.Reply) -> None:
        if not reply.ok:
            failure = reply.error or wire.Failure("error", "hello was refused")
            if failure.code == errors.BrokerUnavailable.code:
                return  # it is just stopping: the next one is asked
            raise errors.from_wire(failure.code, failure.message, failure.fields)
        self._greeting = None
        first, self.boot = not self.boot, reply.boot
        welcome = wire.convert(reply.body, wire.Welcome)
        self.ledger = self._greeted(welcome)
        if first:
            self._at, self._number = self.ledger.block(welcome.block), welcome.session
            self._life = self.ledger.address(self._at + Block.LIFE)
            linux.robust_lock(self._life)
        with self._lock:
            self._outbox = deque(self._calls.values())
        self.welcomed.set()

    def _same_boot(self, boot: bytes) -> bool:
        if boot == self.boot:
            return True
        if self.boot and not self._greeting and not self._greet_at:
            self._greet_at = time.monotonic() + random.uniform(0.0, BACK_OFF)
        return False
