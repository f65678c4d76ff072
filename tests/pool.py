"""Processes that serve more than one test: at a GPU a new one costs seconds, nearly all of them for its CUDA context.

The tests marked ``cuda`` of one pytest process run their children in a :class:`Pool`, and share a broker, at a
:class:`Place` where each has a namespace of its own. ``@pytest.mark.fresh("children")`` is for those to whom it matters
that a process is new, or ends; ``fresh("broker")`` for those that kill the broker or count what it has.
``IPCSYNC_TEST_POOL=1`` has every test share (to try this file without a GPU), ``0`` none.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import ipcsync

from .harness import KEPT, TIMEOUT, Broker, Child, Hang, Peer, begin, run
from .places import Runtime

_spawn = get_context("spawn")
NOWHERE = "/nonexistent/this-test-needs-the-runtime-fixture"
KEEP = 4  # processes that wait for work; a test has seldom more children at once
SPARE = 2  # at a GPU, so many are made ready ahead, while tests run
READY = 50.0  # seconds until a process has its context, with several beside it
#: Hardware queues of a child: a test's child uses few streams, and a GPU has not 32 queues for many contexts at once.
_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
_RELEVANT = re.compile(r"(CUDA|CUPY|PYTORCH|XLA|NCCL|PYTHON|LD_|IPCSYNC_)")
#: A program that becomes the one it is given, and ends with us, should this process be ended in the middle of a test.
_WITH_US = "import os, sys; from ipcsync import linux; linux.die_with_parent(9); os.execv(sys.argv[1], sys.argv[1:])"
_PER_TEST = ("IPCSYNC_RUNTIME_DIR", "IPCSYNC_NAMESPACE")
_OF_TORCH = "CUDA_MODULE_LOADING"  # which it sets as it starts, to CUDA's own default


def shares(item: pytest.Item, what: str) -> bool:
    """Whether this test shares its "children" or its "broker" with others."""
    mode = os.environ.get("IPCSYNC_TEST_POOL")
    fresh = any(not mark.args or what in mark.args for mark in item.iter_markers("fresh"))
    return mode != "0" and not fresh and (mode == "1" or item.get_closest_marker("cuda") is not None)


def environment() -> dict[str, str]:
    """What a process reads once, if at all: a child that needs it otherwise needs another process."""
    apart = {*_PER_TEST, _OF_TORCH}
    return {name: text for name, text in os.environ.items() if _RELEVANT.match(name) and name not in apart}


# -- in the child

_own: dict[str, str] = {}  # what stays in this process's environment


@dataclass(frozen=True)
class Task:
    """A function for a process of the pool, and where it runs."""

    environ: dict[str, str]
    path: list[str]
    pickled: bytes  # (function, arguments)

    def __call__(self, peer: Peer) -> Any:
        os.environ.clear()
        os.environ.update(self.environ | _own)
        sys.path[:] = self.path
        fn, args = pickle.loads(self.pickled)
        with warnings.catch_warnings():
            return fn(peer, *args)


def _serve(connection: Connection, parent: int, cuda: bool) -> None:
    """Runs one function after the other, until one raises or nobody is there to ask."""
    begin(parent)
    if cuda:
        _own.update(_QUEUES)  # as it began, whatever the test's process has
        _warm()
    try:
        while True:
            connection.send(("idle", None, None))
            while not isinstance(task := connection.recv(), Task):
                pass  # what a function that returned has not read
            if not run(connection, task):
                return
            if not _settle():
                connection.send(("leaving", None, None))
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _warm() -> None:
    """Makes the context and loads the kernels; what cannot be done is found again by whoever needs it."""
    try:
        from .conformance.cases import Case

        Case("cuda").close()
    except Exception:
        traceback.print_exc()


def _settle() -> bool:
    """What the end of a process would do: lets go of what is held, and ends its sessions. Whether that worked."""
    if (cases := sys.modules.get("tests.conformance.cases")) is not None:
        for case in list(cases.Case.made):
            case.close()
    if (session := sys.modules.get("ipcsync.session")) is not None:
        session._at_exit()
    gc.collect()
    return let_go(set())


def hold() -> set[object]:
    """Others' GPU memory that this process has open, and how much it has still to let go: so long, new memory of the
    same process may come under the handle of the old."""
    backend = getattr(sys.modules.get("ipcsync.backends.select"), "_made", {}).get("cuda")
    return set() if backend is None else {*list(backend._memories._opened), *range(backend._quarantine.held)}


def let_go(before: set[object]) -> bool:
    """Whether, within a moment, this process holds no more than `before`."""
    deadline = time.monotonic() + 2.0
    while more := hold() - before:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not more


# -- in the test


class Worker:
    """A process of the pool, as the test's process sees it."""

    def __init__(self, cuda: bool) -> None:
        self.environment = environment()
        self.connection, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(theirs, os.getpid(), cuda), daemon=False)
        with _environ({**dict.fromkeys(_PER_TEST), "IPCSYNC_RUNTIME_DIR": NOWHERE, **(_QUEUES if cuda else {})}):
            self.process.start()  # it belongs to no test
        theirs.close()
        self.resting = self.leaving = False

    def rest(self, timeout: float) -> None:
        """Waits until it is done with its function; what that sent and nobody read is dropped."""
        while not (self.resting or self.leaving):
            if not self.connection.poll(timeout):
                raise Hang(f"process {self.process.pid} was not ready for another function within {timeout:g} s")
            kind = self.connection.recv()[0]
            self.resting, self.leaving = kind == "idle", kind == "leaving"

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(TIMEOUT)
        self.process.close()
        self.connection.close()


@contextmanager
def _environ(wanted: dict[str, str | None]) -> Iterator[None]:
    """For a block, these variables (None: without)."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in wanted.items():
            patch.delenv(name, raising=False) if text is None else patch.setenv(name, text)
        yield


class Pool:
    """Processes that wait for a function to run. ``counts``: how many were ``started``, and ``functions`` run."""

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        self.counts: Counter[str] = Counter()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], *, cuda: bool) -> Pooled:
        """Runs ``fn(peer, *args)`` in one of them."""
        self.counts["functions"] += 1
        while True:
            worker, began = self._take(cuda)
            try:
                return Pooled(self, worker, fn, args, cuda=cuda)
            except BaseException as error:
                worker.end()
                if began or not isinstance(error, OSError | EOFError):
                    raise  # else it ended while it waited

    def _take(self, cuda: bool) -> tuple[Worker, bool]:
        """One that waits (if possible, one that is ready by now) or a new one, and whether it is new."""
        here = environment()
        for worker in sorted(self.idle, key=lambda each: not (each.resting or each.connection.poll(0))):
            if worker.environment == here:
                self.idle.remove(worker)
                return worker, False
        return self._start(cuda), True

    def _start(self, cuda: bool) -> Worker:
        self.counts["started"] += 1
        return Worker(cuda)

    def give_back(self, worker: Worker) -> None:
        self.idle.append(worker)
        while len(self.idle) > KEEP:
            self.idle.pop(0).end()

    def replace(self, cuda: bool) -> None:
        """After one was lost: at a GPU, the next is made ready while tests run."""
        while cuda and len(self.idle) < SPARE:
            self.idle.append(self._start(cuda))

    def clear(self) -> None:
        while self.idle:
            self.idle.pop().end()


class Pooled(Child):
    """A function that runs in a process of the pool. The process is kept if it returned, and nobody signalled it."""

    def __init__(
        self, pool: Pool, worker: Worker, fn: Callable[..., Any], args: tuple[Any, ...], *, cuda: bool
    ) -> None:
        self._pool, self._worker, self._cuda = pool, worker, cuda
        self._connection, self.process, self.name = worker.connection, worker.process, fn.__name__
        self._over = self._done = self._spoilt = False
        worker.rest(READY)
        worker.resting = False
        self._connection.send(Task(dict(os.environ), list(sys.path), pickle.dumps((fn, args))))

    def kill(self, sig: int = signal.SIGKILL) -> None:
        self._spoilt = True
        super().kill(sig)

    def _next(self, timeout: float) -> tuple[str, Any]:
        kind, value = super()._next(timeout)
        self._done = kind == "done"
        return kind, value

    def _rest(self, timeout: float) -> None:
        if not self._done:
            return super()._rest(timeout)
        try:
            return self._worker.rest(timeout)
        except Hang:
            self._dump()
            raise
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"{self.name} returned, and its process ended") from None

    def _unseen(self) -> BaseException | None:
        if not self._over:
            self._connection.poll(0.2)  # a process that is kept is worth a moment
        unseen = super()._unseen()
        if self._done and not self._spoilt:
            try:
                self._rest(TIMEOUT)
            except AssertionError as error:
                self._spoilt = True
                return unseen or error
        return unseen

    def _part(self) -> None:
        if self._worker.resting and not self._spoilt:
            self._pool.give_back(self._worker)
        else:
            self._worker.end()
            self._pool.replace(self._cuda)


class Place:
    """A runtime directory with a broker that tests share, each in a namespace of its own."""

    def __init__(self) -> None:
        self._runtime, self._namespaces, self._warm = Runtime(), 0, False
        try:
            self.broker = Broker(self.path, under=(sys.executable, "-c", _WITH_US))
        except BaseException:
            self._runtime.remove()
            raise

    @property
    def path(self) -> Path:
        return self._runtime.path

    def namespace(self) -> str:
        self._namespaces += 1
        return f"t{self._namespaces}"

    def warm(self) -> None:
        """Has the broker make its context, and this process: with a longer patience than a test has."""
        if not self._warm:
            with ipcsync.connect(str(self.path), timeout=READY, default_timeout=READY) as session:
                session.create_event("warm", device="cuda").close()
            self._warm = True

    def left(self) -> list[str]:
        """What a test left, of files and processes."""
        kept = (*KEPT, "broker.sock", "announce.sock", "pulse.sock")
        return self._runtime.leaks(kept, moment=2.0, at_home=self.broker.pid)

    def close(self, leaves: tuple[str, ...] = ()) -> list[str]:
        """Ends the broker, and says what was wrong with it and what is left even then."""
        try:
            ended = self.broker.process.poll() is not None
            status = self.broker.stop()
            wrong = [f"the broker {'died' if ended else 'left'} with status {status}:\n{self.broker.log()}"]
            return [*(wrong if ended or status else []), *self._runtime.leaks((*KEPT, *leaves))]
        finally:
            self._runtime.remove()


GONE, FAILED = "it is gone", "a test failed"


class Shared:
    """What the tests of one pytest process share."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.place: Place | None = None
        self._given_up: Counter[str] = Counter()  # why brokers were
        self._before: set[object] = set()

    def at(self) -> Place:
        if self.place is None:
            self.pool.counts["brokers"] += 1
            self.place = Place()
        self._before = hold()
        return self.place

    def problems(self, leaves: tuple[str, ...], *, failed: bool = False) -> list[str]:
        """After a test: what it left that no orderly end of the broker, and of its children, removes."""
        if self.place is None:
            return []
        if why := self._unfit(leaves, failed):
            self._given_up[why] += 1
            if why not in (GONE, FAILED):
                self.pool.clear()  # it may be one of them who holds it
            return self._end(leaves)
        return []

    def _unfit(self, leaves: tuple[str, ...], failed: bool) -> str:
        """Why the next test shall not have this broker."""
        assert self.place is not None
        if self.place.broker.process.poll() is not None:
            return GONE
        if failed:
            return FAILED  # what its traceback holds is not let go
        if leaves:
            return f"{leaves} are left on purpose"
        if left := self.place.left():
            return left[0]
        return "" if let_go(self._before) else "its memory is still open here"

    def _end(self, leaves: tuple[str, ...]) -> list[str]:
        place, self.place = self.place, None
        return place.close(leaves) if place is not None else []

    def close(self) -> list[str]:
        self.pool.clear()
        return self._end(())

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.pool.counts.items()))
        return f"{counts or 'nothing'}; brokers given up: {dict(self._given_up) or 'none'}"
