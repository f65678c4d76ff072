"""The client's line to the broker: one I/O thread that owns the sockets, and calls from any other thread.

It says hello, holds the session's robust life word (so its end is the session's death), beats, matches replies to calls
and notices a broker that was restarted: every reply and announcement carries the boot token. Then it says hello again,
with what the session holds, after a jittered pause; calls that were under way are sent again.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from . import errors, linux, runtime, wire
from .ledger import Block, Ledger
from .waiting import Deadline

S = TypeVar("S")
BEAT = 1.0
GRACE = 0.5  # seconds that a broker gets beyond a call's deadline to say why it failed
BACK_OFF = 0.3  # up to this long a session waits before it greets a restarted broker: they all come at once
LOST = 10.0  # a call without a deadline gives up after no broker was there for so long


class _Call:
    __slots__ = ("body", "done", "id", "op", "reply", "until")

    def __init__(self, id: int, op: str, body: dict[str, Any], until: float | None) -> None:
        self.id, self.op, self.body, self.until = id, op, body, until
        self.done = threading.Event()
        self.reply: wire.Reply | errors.IpcSyncError | None = None


class Link(threading.Thread):
    """`hello` makes the greeting anew each time; `greeted(welcome, ledger)` is told of each that was answered."""

    def __init__(
        self,
        directory: Path,
        namespace: str,
        hello: Callable[[], wire.Hello],
        greeted: Callable[[wire.Welcome], Ledger],
        heard: Callable[[wire.Announcement], None],
    ) -> None:
        super().__init__(name="ipcsync-link", daemon=True)
        self.directory, self.namespace = directory, namespace
        self._hello, self._greeted, self._heard = hello, greeted, heard
        self._ids = 0
        self._calls: dict[int, _Call] = {}
        self._outbox: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending = False
        self._greeting: _Call | None = None
        self._greet_at = 0.0
        self.boot = b""
        self.welcomed = threading.Event()
        self.failure: errors.IpcSyncError | None = None
        self.ledger: Ledger | None = None
        self._life = self._at = self._number = 0

    # -- any thread

    def call(self, op: str, body: msgspec.Struct, reply: type[S], deadline: Deadline) -> S:
        left = None if deadline.at is None else max(0.0, deadline.at - time.monotonic())
        with self._lock:
            if self._ending:
                raise errors.SessionClosed("the session was closed: connect again")
            self._ids += 1
            call = _Call(self._ids, op, msgspec.to_builtins(body, builtin_types=(bytes,)), deadline.at)
            self._calls[call.id] = call
            self._outbox.append(call)
        self._ring()
        gone_since: float | None = None
        until = None if left is None else time.monotonic() + left + GRACE
        while not call.done.wait(0.5 if until is None else max(0.0, min(0.5, until - time.monotonic()))):
            now = time.monotonic()
            if until is not None and now >= until:
                break
            gone_since = None if runtime.broker_pid(self.directory) is not None else gone_since or now
            if until is None and gone_since is not None and now - gone_since > LOST:
                break
        with self._lock:
            self._calls.pop(call.id, None)
        if call.reply is None:
            raise errors.BrokerUnavailable(
                f"no broker answered {op!r} in time: is one running in {self.directory}? Attached work goes on"
            )
        if isinstance(call.reply, errors.IpcSyncError):
            raise call.reply
        if not call.reply.ok:
            wire.raise_failure(call.reply.error or wire.Failure("error", "the broker gave no reason"))
        return wire.convert(call.reply.body, reply)

    def post(self, op: str, body: msgspec.Struct) -> None:
        """Sends a request whose answer nobody waits for."""
        with self._lock:
            self._ids += 1
            self._outbox.append(_Call(self._ids, op, msgspec.to_builtins(body, builtin_types=(bytes,)), None))
        self._ring()

    def stop(self) -> None:
        """Ends the thread; its life word is unlocked, so it is no death."""
        self._ending = True
        self._ring()
        self.join(5.0)

    def _ring(self) -> None:
        try:
            os.eventfd_write(self._bell, 1)
        except OSError:
            pass  # the thread has ended and closed it

    # -- the I/O thread

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        dealer, sub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        try:
            for socket in (dealer, sub):
                socket.setsockopt(zmq.LINGER, 200)
                socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
                socket.setsockopt(zmq.RECONNECT_IVL, 50)
                socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            sub.setsockopt(zmq.SUBSCRIBE, self.namespace.encode())
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            dealer.connect(runtime.broker_endpoint(self.directory))
            sub.connect(runtime.announce_endpoint(self.directory))
            self._loop(dealer, sub)
        except BaseException as error:
            self.failure = self.failure or errors.IpcSyncError(f"the session's I/O thread failed: {error!r}")
            self.welcomed.set()
            if not isinstance(error, errors.IpcSyncError):
                raise
        finally:
            if self._life and self._ending:
                linux.robust_unlock(self._life)
            for call in list(self._calls.values()):
                call.reply = errors.SessionClosed("the session was closed: connect again")
                call.done.set()
            dealer.close()
            sub.close()
            context.term()
            os.close(self._bell)

    def _loop(self, dealer: zmq.Socket[bytes], sub: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for source in (dealer, sub, self._bell):
            poller.register(source, zmq.POLLIN)
        beat_at = time.monotonic() + BEAT
        self._greet(dealer)
        while not self._ending or self._outbox:
            now = time.monotonic()
            if self._greet_at and now >= self._greet_at:
                self._greet(dealer)
            if now >= beat_at and self.welcomed.is_set():
                beat_at = now + BEAT
                self._beat()
            if self.welcomed.is_set() and not self._greeting:
                while self._outbox:
                    call = self._outbox.popleft()
                    self._send(dealer, call.id, call.op, call.body, call.until)
            elif self._ending:
                return
            wake = min(beat_at, self._greet_at or beat_at)
            ready = dict(poller.poll(max(0.0, wake - time.monotonic()) * 1000))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if dealer in ready:
                self._receive(dealer)
            if sub in ready:
                self._listen(sub)

    def _beat(self) -> None:
        """Says that we live, in a word that the broker reads: it costs a busy broker nothing."""
        if self.ledger is not None and self.ledger.words[self._at + Block.SESSION] == self._number:
            self.ledger.words[self._at + Block.BEAT] += 1

    def _send(self, dealer: zmq.Socket[bytes], id: int, op: str, body: dict[str, Any], until: float | None) -> None:
        left = None if until is None else max(0.0, until - time.monotonic())
        dealer.send(wire.encode(wire.Request(wire.PROTOCOL_MAX, id, op, body, left)))

    def _greet(self, dealer: zmq.Socket[bytes]) -> None:
        with self._lock:
            self._ids += 1
            id = self._ids
        body = msgspec.to_builtins(self._hello(), builtin_types=(bytes,))
        self._greeting, self._greet_at = _Call(id, "hello", body, None), 0.0
        self._send(dealer, id, "hello", body, None)

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
                call = self._calls.get(reply.id)
                if call is not None:
                    call.reply = reply
                    call.done.set()

    def _welcome(self, reply: wire.Reply) -> None:
        self._greeting = None
        if not reply.ok:
            failure = reply.error or wire.Failure("error", "hello was refused")
            self.failure = errors.from_wire(failure.code, failure.message, failure.fields)
            self.welcomed.set()
            raise self.failure
        first = not self.boot
        self.boot = reply.boot
        welcome = wire.convert(reply.body, wire.Welcome)
        self.ledger = self._greeted(welcome)
        if first:
            self._at, self._number = self.ledger.block(welcome.block), welcome.session
            self._life = self.ledger.address(self._at + Block.LIFE)
            linux.robust_lock(self._life)
        else:
            with self._lock:
                self._outbox.extend(call for call in self._calls.values() if call not in self._outbox)
        self.welcomed.set()

    def _same_boot(self, boot: bytes) -> bool:
        if boot == self.boot:
            return True
        if self.boot and not self._greeting and not self._greet_at:
            self._greet_at = time.monotonic() + random.uniform(0.0, BACK_OFF)
        return False

    def _listen(self, sub: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                announcement = wire.decode(frames[-1], wire.Announcement)
            except errors.BadMessage:
                continue
            if self._same_boot(announcement.boot):
                self._heard(announcement)
