"""A client of the broker's protocol with nothing behind it: one socket, typed messages, no threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ipcsync import ledger, linux, runtime, wire

TIMEOUT = 30_000  # milliseconds until a missing answer fails the test


def hello(name: str = "raw", *, pid: int | None = None, **changed: Any) -> wire.Hello:
    pid = os.getpid() if pid is None else pid
    fields: dict[str, Any] = {
        "protocol_min": wire.PROTOCOL_MIN, "protocol_max": wire.PROTOCOL_MAX, "layout": ledger.LAYOUT,
        "version": "test", "name": name, "namespace": "default", "pid": pid, "start": linux.start_time(pid),
        "boot_id": linux.boot_id(), "pid_namespace": linux.pid_namespace(), "uid": os.getuid(),
    }  # fmt: skip
    return wire.Hello(**{**fields, **changed})


class Raw:
    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        self.directory = directory
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(runtime.broker_endpoint(directory))
        self.sent = 1 << 40  # ids of its own, far from those of garbage
        self.welcome: wire.Welcome

    def hello(self, name: str = "raw", **changed: Any) -> Raw:
        found = self.call("hello", hello(name, **changed))
        assert isinstance(found, wire.Welcome), found
        self.welcome = found
        return self

    def send(self, op: str, body: msgspec.Struct, left: float | None = 30.0) -> None:
        self.sent += 1
        plain = msgspec.to_builtins(body, builtin_types=(bytes,))
        self.socket.send(wire.encode(wire.Request(wire.PROTOCOL_MAX, self.sent, op, plain, left)))

    def receive(self, op: str) -> Any:
        """The reply to the last request sent, typed; a ``Failure`` is returned, not raised."""
        reply = None
        while reply is None or reply.id != self.sent:
            assert self.socket.poll(TIMEOUT), f"no answer to {op}"
            reply = wire.decode(self.socket.recv(), wire.Reply)
        if reply.error is not None:
            return reply.error
        kind = wire.OPS[op][1]
        return reply.body if kind is None else wire.convert(reply.body, kind)

    def call(self, op: str, body: msgspec.Struct, left: float | None = 30.0) -> Any:
        self.send(op, body, left)
        return self.receive(op)

    def close(self) -> None:
        self.socket.close()


class Listener:
    """All announcements, in order."""

    def __init__(self, context: zmq.Context[Any], directory: Path) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.connect(runtime.announce_endpoint(directory))
        self.socket.subscribe(b"")

    def until(self, kind: str) -> list[wire.Announcement]:
        """What comes up to and including the first of `kind`."""
        got = []
        while True:
            assert self.socket.poll(TIMEOUT), f"no {kind} announcement"
            got.append(wire.decode(self.socket.recv_multipart()[1], wire.Announcement))
            if got[-1].kind == kind:
                return got

    def close(self) -> None:
        self.socket.close()


class Clients:
    """Makes clients of one broker, and closes them all at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._context: zmq.Context[Any] = zmq.Context()
        self._made: list[Raw | Listener] = []

    def raw(self) -> Raw:
        """Connected, without a hello."""
        made = Raw(self._context, self.directory)
        self._made.append(made)
        return made

    def session(self, name: str = "raw", **changed: Any) -> Raw:
        return self.raw().hello(name, **changed)

    def listener(self) -> Listener:
        made = Listener(self._context, self.directory)
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()
        self._context.term()
