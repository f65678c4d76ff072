"""Asking a broker what it knows without being a session of its: one request, one answer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import runtime, wire
from .errors import BadMessage, BrokerUnavailable

if TYPE_CHECKING:
    import zmq


class Asker:
    """Asks the broker of one runtime directory. One thread at a time."""

    def __init__(self, directory: Path, context: zmq.Context[Any] | None = None) -> None:
        import zmq

        self.directory = directory
        self._own = context is None
        self._context = zmq.Context() if context is None else context
        self._socket: zmq.Socket[bytes] | None = None
        self._last = 0

    def status(self, timeout: float = 2.0) -> dict[str, Any]:
        """What the broker's own loop answers to ``status``; ``BrokerUnavailable`` after `timeout` seconds."""
        import zmq

        socket = self._connected()
        self._last += 1
        request = wire.Request(wire.PROTOCOL_MAX, self._last, "status", {}, timeout)
        until = time.monotonic() + timeout
        socket.send(wire.encode(request))
        while socket.poll(max(0, round((until - time.monotonic()) * 1000)), zmq.POLLIN):
            try:
                reply = wire.decode(socket.recv(), wire.Reply)
            except BadMessage as error:
                raise BrokerUnavailable(f"what answers in {self.directory} is no broker: {error}") from None
            if reply.id == self._last:
                if reply.error is not None:
                    wire.raise_failure(reply.error)
                return reply.body
        self._disconnect()  # a late answer must not meet the next question
        raise BrokerUnavailable(f"the broker of {self.directory} did not answer within {timeout:g} s")

    def close(self) -> None:
        self._disconnect()
        if self._own:
            self._context.term()

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connected(self) -> zmq.Socket[bytes]:
        import zmq

        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, 64 * wire.MAX_MESSAGE)
            self._socket.connect(runtime.broker_endpoint(self.directory))
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def find(explicit: Path | str | None = None) -> Path:
    """The runtime directory with a broker in it; ``BrokerUnavailable`` says so when there is none."""
    where = runtime.directory(explicit, create=False)
    if runtime.broker_pid(where) is None:
        left = " (there are sessions of a broker that died)" if os.path.exists(where / runtime.LEDGER) else ""
        raise BrokerUnavailable(
            f"no broker runs in {where}{left}: start one with `ipcsync broker`, or name another directory with "
            "--runtime-dir or IPCSYNC_RUNTIME_DIR",
            path=str(where),
        )
    return where
