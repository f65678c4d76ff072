"""Round trips between two processes on the CPU: ours, and what a user would pick instead."""

from __future__ import annotations

import ctypes
import mmap
import os
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import ipcsync

from .contest import Contestant


class Trip(Contestant):
    """There (``turn``) and back (``answer``)."""


class SharedEvents(Trip):
    """Two shared events: one recorded here, one there."""

    name = "ipcsync shared event"

    def open(self, peer: int | None) -> None:
        self.session = ipcsync.connect()
        if peer is not None:
            self.ping, self.pong = self.session.open_event("bench-ping"), self.session.open_event("bench-pong")
        else:
            self.ping = self.session.create_event("bench-ping", device="cpu")
            self.pong = self.session.create_event("bench-pong", device="cpu")

    def turn(self, case: int, number: int) -> None:
        self.ping.record()
        self.pong.synchronize(round=number)

    def answer(self, peer: int, case: int, number: int) -> None:
        self.ping.synchronize(round=number)
        self.pong.record()

    def close(self) -> None:
        self.session.close()


_WAIT, _WAKE, _SYS_FUTEX = 0, 1, 202


class Futex(Trip):
    """The floor: two words of a shared page and the bare system call through ctypes."""

    name = "ctypes futex (floor)"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.path = folder / "futex"
        self.path.write_bytes(bytes(4096))

    def open(self, peer: int | None) -> None:
        with self.path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 4096)
        self.words = memoryview(self.map).cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.futex = ctypes.CDLL(None, use_errno=True).syscall
        self.futex.argtypes = [
            ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_uint32,
        ]  # fmt: skip

    def _store(self, index: int, number: int) -> None:
        self.words[index] = number
        self.futex(_SYS_FUTEX, self.address + 4 * index, _WAKE, 1, None, None, 0)

    def _wait(self, index: int, number: int) -> None:
        while (seen := self.words[index]) < number:
            self.futex(_SYS_FUTEX, self.address + 4 * index, _WAIT, seen, None, None, 0)

    def turn(self, case: int, number: int) -> None:
        self._store(0, number)
        self._wait(16, number)

    def answer(self, peer: int, case: int, number: int) -> None:
        self._wait(0, number)
        self._store(16, number)


class Semaphores(Trip):
    name = "mp.Semaphore"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.ping, self.pong = context.Semaphore(0), context.Semaphore(0)

    def turn(self, case: int, number: int) -> None:
        self.ping.release()
        self.pong.acquire()

    def answer(self, peer: int, case: int, number: int) -> None:
        self.ping.acquire()
        self.pong.release()


class Events(Trip):
    name = "mp.Event"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.ping, self.pong = context.Event(), context.Event()

    def turn(self, case: int, number: int) -> None:
        self.ping.set()
        self.pong.wait()
        self.pong.clear()

    def answer(self, peer: int, case: int, number: int) -> None:
        self.ping.wait()
        self.ping.clear()
        self.pong.set()


class Queues(Trip):
    name = "mp.Queue"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.ping, self.pong = context.Queue(), context.Queue()

    def turn(self, case: int, number: int) -> None:
        self.ping.put(1)
        self.pong.get()

    def answer(self, peer: int, case: int, number: int) -> None:
        self.ping.get()
        self.pong.put(1)


class Pair(Trip):
    name = "ZeroMQ PAIR, ipc"

    def prepare(self, context: SpawnContext, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/pair-{os.getpid()}"

    def open(self, peer: int | None) -> None:
        import zmq

        self.context: Any = zmq.Context()
        self.socket: Any = self.context.socket(zmq.PAIR)
        if peer is not None:
            self.socket.connect(self.endpoint)
        else:
            self.socket.bind(self.endpoint)

    def turn(self, case: int, number: int) -> None:
        self.socket.send(b"x")
        self.socket.recv()

    def answer(self, peer: int, case: int, number: int) -> None:
        self.socket.recv()
        self.socket.send(b"x")

    def close(self) -> None:
        self.socket.close()
        self.context.term()


TRIPS: list[type[Trip]] = [SharedEvents, Futex, Semaphores, Events, Queues, Pair]
