"""What supervisor and worker say to each other, over a socket pair that keeps messages apart: msgpack of these structs.

The pair is also how each learns of the other's end: it reads as closed.
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .plan import WorkerPlan

LARGEST = 1 << 17


class Plan(Struct, tag=True):
    """Supervisor to worker, first: what to run."""

    worker: WorkerPlan
    call: str
    folder: str
    directory: str  # the runtime directory
    namespace: str
    params: dict[str, Any]
    policy: Literal["block", "latest"]
    counters: int  # descriptor of the counters' page
    board: int  # ... of the board
    words: int  # ... and how many it has
    again: bool = False  # it is started again when it fails, or may have been: what it does can be done a second time
    keep_open: bool = False  # it will be started again: on failure its channels are left, not ended
    restarts: int = 0
    trace: str = ""  # folder of the trace's parts; empty: no trace


class Ready(Struct, tag=True):
    """Worker to supervisor: imported, connected, its channels open."""


class Go(Struct, tag=True):
    """Supervisor to worker: every stage is ready, nothing written now is missed."""


class Drain(Struct, tag=True):
    """Supervisor to worker: make nothing new, finish what was begun."""


class Done(Struct, tag=True):
    """Worker to supervisor, last: the stage has returned."""

    counts: dict[str, int] = {}


class Failed(Struct, tag=True):
    """Worker to supervisor, last. ``consequence``: it failed because another stage did, or was told to stop, and is not
    started again for that. ``peer``: because another one died."""

    traceback: str
    consequence: bool
    counts: dict[str, int] = {}
    peer: bool = False


FromWorker = Ready | Done | Failed
FromSupervisor = Plan | Go | Drain


def send(end: socket.socket, message: Struct) -> None:
    """Sends one message; a peer that is gone is no error here, its end is seen elsewhere."""
    try:
        end.send(msgspec.msgpack.encode(message))
    except (BrokenPipeError, ConnectionResetError):
        pass


def receive(end: socket.socket, kind: Any) -> Any:
    """The next message, or None when the peer is gone."""
    try:
        frame = end.recv(LARGEST)
    except ConnectionResetError:
        return None
    return msgspec.msgpack.decode(frame, type=kind) if frame else None
