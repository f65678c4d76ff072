"""Processes to be killed, by the thousand: starting Python and importing everything takes a third of a second each, so
on the host one process that has imported everything, and started nothing (no thread, no socket), forks them in
milliseconds. What they do is as in any process: each connects for itself. With CUDA they are spawned."""

from __future__ import annotations

import importlib
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from ..harness import TIMEOUT, Child, Hang, Peer, _child
from .bench import Start

#: What a session, its events, channels and arrays need.
_MODULES = (
    "numpy",
    "zmq",
    "ipcsync.session",
    "ipcsync.link",
    "ipcsync.channel",
    "ipcsync.channel_reader",
    "ipcsync.channel_writer",
    "ipcsync.shared_array",
    "ipcsync.sharing",
    "ipcsync.shared_event",
    "ipcsync.backends.host",
    "tests.faults.test_kills",
)


def _forks(peer: Peer, address: str) -> None:
    for name in _MODULES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    parent = os.getpid()
    peer.send("ready")
    while (order := peer.recv(3600)) is not None:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = 1
            try:
                connection = Client(address)
                connection.send(os.getpid())
                _child(connection, parent, *order)
                status = 0
            finally:
                os._exit(status)


class _Process:
    """As much of multiprocessing's Process as Child uses, of a grandchild."""

    def __init__(self, pid: int) -> None:
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def join(self, timeout: float | None = None) -> None:
        select.select([self._fd], [], [], timeout)

    def is_alive(self) -> bool:
        return not select.select([self._fd], [], [], 0)[0]

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else 0  # its parent knows; nobody asks

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._fd)


class _Grandchild(Child):
    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self.name, self._over = connection, name, False
        self.process: Any = _Process(connection.recv())

    def kill(self, sig: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):  # nobody waits for it, so it may be gone altogether
            super().kill(sig)
        self._over |= sig == signal.SIGKILL


@contextmanager
def starts(device: str) -> Iterator[Start]:
    """How processes that will be killed are started, for a block."""
    if device != "cpu":
        yield Child
        return
    with Listener(family="AF_UNIX") as listener:
        nest = Child(_forks, (listener.address,))

        def start(fn: Any, args: tuple[Any, ...]) -> Child:
            nest.send((fn, args))
            socket: Any = listener._listener._socket  # type: ignore[attr-defined]
            if not select.select([socket], [], [], TIMEOUT)[0]:
                raise Hang("no process was forked")
            return _Grandchild(listener.accept(), fn.__name__)

        try:
            assert nest.recv(60) == "ready"
            yield start
            nest.send(None)
            nest.join()
        finally:
            nest.end()
