"""What tests are made of: real processes that talk to the test, latches, a broker, and a look for what was left behind.

Nothing here sleeps in the hope that something has happened: a child says what it did (``peer.send``), a stream is held
by a :class:`Gate`, and every wait ends with an error that says what did not come.
"""

from __future__ import annotations

import faulthandler
import fnmatch
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ipcsync import linux

TIMEOUT = 30.0  # seconds for any one step: only a hang takes that long
SHM = Path("/dev/shm")
PREFIX = "ipcsync-test-"  # runtime directories of tests
#: What a broker that ended in order may leave in its runtime directory (patterns, relative).
KEPT = ("broker.lock", "journal", "ledger", "l1")
_spawn = get_context("spawn")


class Hang(AssertionError):
    """A step that takes milliseconds did not happen in TIMEOUT seconds."""


def wait_until(condition: Callable[[], Any], what: str, timeout: float = TIMEOUT) -> Any:
    """Polls `condition` until it is true, and returns its value. For what no latch can tell."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Hang(f"{what} did not happen within {timeout:g} s")
        time.sleep(0.001)
    return value


class Gate:
    """Holds a stream (or a thread) until it is opened: ``stream.enqueue(gate.hold)``, then ``gate.open()``.

    ``reached`` is set once something stands at it.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()

    def hold(self) -> None:
        self.reached.set()
        if not self._open.wait(TIMEOUT):
            raise Hang("nobody opened the gate")

    def open(self) -> None:
        self._open.set()


# -- children


class Peer:
    """The child's end: what its function gets as first argument."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any = None) -> None:
        self._connection.send(("value", value, None))

    def recv(self, timeout: float = TIMEOUT) -> Any:
        if not self._connection.poll(timeout):
            raise Hang("the test did not send anything")
        return self._connection.recv()


class RemoteTraceback(Exception):
    """The child's traceback, chained to what it raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def begin(parent: int) -> None:
    """The first thing that a child does: it ends with the test's process, and SIGUSR1 says where it is."""
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def run(connection: Connection, call: Callable[[Peer], Any]) -> bool:
    """Runs a child's function and sends what came of it. Whether it returned."""
    try:
        connection.send(("done", call(Peer(connection)), None))
        return True
    except BaseException as error:
        text = traceback.format_exc()
        try:
            connection.send(("raised", error, text))
        except Exception:  # it does not pickle
            connection.send(("raised", RuntimeError(repr(error)), text))
        return False


def _child(connection: Connection, parent: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    begin(parent)
    run(connection, lambda peer: fn(peer, *args))


class Child:
    """A spawned process that runs one function. What it raises is raised here, at the next ``recv`` or ``join``."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._connection, theirs = _spawn.Pipe()
        self.name = fn.__name__
        self.process = _spawn.Process(target=_child, args=(theirs, os.getpid(), fn, args), daemon=False)
        self.process.start()
        theirs.close()
        self._over = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, value: Any = None) -> None:
        self._connection.send(value)

    def recv(self, timeout: float = TIMEOUT) -> Any:
        """The next thing the child sends."""
        kind, value = self._next(timeout)
        if kind == "done":
            raise AssertionError(f"{self.name} returned {value!r} where the test expected it to send something")
        return value

    def join(self, timeout: float = TIMEOUT) -> Any:
        """Waits for the child's end and returns what its function returned. What it sent unread is dropped."""
        value = None
        while not self._over:
            _, value = self._next(timeout)
        self._rest(timeout)
        return value

    def returned(self) -> bool:
        """Whether its function has ended. Of one that sends nothing: what is unread looks the same."""
        return self._over or self._connection.poll(0)

    def _rest(self, timeout: float) -> None:
        """Waits until the process is done with the test."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self._dump()
            raise Hang(f"{self.name} finished its function but did not exit")
        if self.process.exitcode != 0:
            raise AssertionError(f"{self.name} ended with exit code {self.process.exitcode}")

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Sends the signal; for SIGKILL also waits until the process is gone."""
        os.kill(self.pid, sig)
        if sig == signal.SIGKILL:
            self._over = True
            self.process.join(TIMEOUT)

    def _next(self, timeout: float) -> tuple[str, Any]:
        if not self._connection.poll(timeout):
            self._dump()
            raise Hang(f"{self.name} (pid {self.pid}) sent nothing within {timeout:g} s")
        try:
            kind, value, text = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._over = True
            self.process.join(TIMEOUT)
            raise AssertionError(f"{self.name} ended (exit code {self.process.exitcode}) without a word") from None
        if kind == "raised":
            self._over = True
            raise value from RemoteTraceback(text)
        self._over = kind == "done"
        return kind, value

    def _dump(self) -> None:
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGUSR1)  # every thread's stack, on the captured stderr
            time.sleep(0.2)

    def end(self) -> BaseException | None:
        """For the end of a test: kills the child if it still runs, and gives what it raised that nobody has seen."""
        unseen = self._unseen()
        self._part()
        return unseen

    def _unseen(self) -> BaseException | None:
        try:
            while not self._over and self._connection.poll(0):
                self._next(0)
        except AssertionError:
            pass  # ended without a word: whoever killed it knows
        except BaseException as error:
            return error
        return None

    def _part(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(TIMEOUT)
        self.process.close()
        self._connection.close()


# -- the broker


class Broker:
    """A real broker process on a runtime directory: ``python -m ipcsync_broker``."""

    def __init__(
        self, runtime: Path, *arguments: str, env: dict[str, str] | None = None, under: tuple[str, ...] = ()
    ) -> None:
        self.runtime, self.arguments, self.env, self.under = runtime, arguments, env or {}, under
        self.start()

    def start(self) -> None:
        """Starts it and returns once it accepts connections. Also used to start the next one after a kill."""
        self.output = Path(f"/tmp/{self.runtime.name}-broker-{secrets.token_hex(4)}.log")
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.under, sys.executable, "-m", "ipcsync_broker", *self.arguments],
                cwd="/",
                env={**os.environ, **self.env, "IPCSYNC_RUNTIME_DIR": str(self.runtime)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            wait_until(self._serves, "the broker's bind")
        except BaseException as error:
            self.process.kill()
            self.process.wait()
            error.add_note(self.log())
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """What it wrote to stdout and stderr so far."""
        return self.output.read_text(errors="replace")

    def _serves(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the broker ended with status {self.process.returncode}")
        with socket.socket(socket.AF_UNIX) as probe:  # a dead broker's socket file is there too, but refuses
            return probe.connect_ex(str(self.runtime / "broker.sock")) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT)

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                self.kill()
                raise Hang(f"the broker did not leave on SIGTERM:\n{self.log()}") from None
        return self.process.returncode


# -- what was left behind


def processes_of(runtime: Path) -> list[tuple[int, str]]:
    """(pid, command) of every live process that was started with this runtime directory in its environment."""
    needle = f"IPCSYNC_RUNTIME_DIR={runtime}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or entry.name == str(os.getpid()):
            continue
        try:
            if needle in (entry / "environ").read_bytes() + b"\0":
                found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except OSError:
            continue  # gone, a zombie, or not ours
    return found


def files_of(runtime: Path, kept: Iterable[str] = KEPT) -> list[str]:
    """Files in the runtime directory that should not have outlived their makers, relative to it."""
    paths = (str(path.relative_to(runtime)) for path in runtime.rglob("*"))
    return sorted(path for path in paths if not any(fnmatch.fnmatch(path, pattern) for pattern in kept))


def segments() -> set[str]:
    """Names in /dev/shm that are ours, without the runtime directories of tests (places.py looks at them)."""
    found = set()
    for path in SHM.iterdir():
        try:
            found_there = path.lstat()
            place = path.name.startswith(PREFIX) and stat.S_ISDIR(found_there.st_mode)
            of_cuda = path.name.startswith("cuda.shm.")  # what CUDA leaves of a killed process is not ours
            if found_there.st_uid == os.getuid() and not place and not of_cuda:
                found.add(path.name)
        except FileNotFoundError:
            continue
    return found


def unused(names: set[str]) -> set[str]:
    """Those of these names in /dev/shm that no live process maps or has in its environment: nobody's any more."""
    left = set(names)
    for entry in Path("/proc").iterdir():
        if left and entry.name.isdigit():
            try:
                text = (entry / "maps").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            left -= {name for name in left if os.fsencode(SHM / name) in text}
    return left & segments()
