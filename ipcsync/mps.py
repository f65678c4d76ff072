"""A private MPS daemon in the runtime directory: with it, processes share a GPU at once instead of taking turns.

Without MPS two processes' kernels take turns on one GPU, a turn costs about 139 us (docs/explanation/cuda.md), and a
hand-off needs at least one. MPS has a price, which :data:`COST` says.

Who uses the daemon holds a lock for as long (the kernel drops it at a death): the last to leave stops the daemon,
unless it was started to stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from . import runtime
from .errors import InvalidState, Unsupported

CONTROL = "nvidia-cuda-mps-control"
COST = (
    "under MPS all of them share one server: a client that is killed in the middle of a kernel takes the other "
    "clients' CUDA contexts along, and every one of them has to be started again"
)
_PATIENCE = 15.0


class Daemon:
    """The MPS control daemon of one runtime directory, which may run or not."""

    def __init__(self, directory: Path) -> None:
        self.runtime = directory
        self.folder = directory / "mps"

    def environment(self) -> dict[str, str]:
        """What makes a process a client of it, if it is there when that process starts CUDA."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }

    def pid(self) -> int | None:
        """Of the control daemon; None when it does not run."""
        try:
            pid = int((self.folder / "pipe" / f"{CONTROL}.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if CONTROL.encode() in command else None

    def say(self, command: str) -> str:
        """Tells the daemon something, as ``echo COMMAND | nvidia-cuda-mps-control`` does; what it answers."""
        done = self._control([], command + "\n")
        if done.returncode:
            raise InvalidState(f"{CONTROL} did not take {command!r}: {(done.stderr or done.stdout).strip()}")
        return done.stdout.strip()

    def start(self) -> int:
        """Starts it, unless it runs; its pid. ``Unsupported`` where it cannot be."""
        running = self.pid()
        if running is not None:
            return running
        shutil.rmtree(self.folder, ignore_errors=True)  # of one that was killed
        for name in ("pipe", "log"):
            (self.folder / name).mkdir(mode=0o700, parents=True)
        done = self._control(["-d"], None)
        until = time.monotonic() + _PATIENCE
        while done.returncode == 0 and time.monotonic() < until:
            pid = self.pid()
            if pid is not None:
                return pid
            time.sleep(0.02)
        said = (done.stderr or done.stdout).strip() or self._logged() or "it said nothing"
        shutil.rmtree(self.folder, ignore_errors=True)
        raise Unsupported(f"{CONTROL} did not start (exit status {done.returncode}): {said}")

    def stop(self) -> None:
        """Ends it and its server, and removes its files. Nothing where none runs."""
        pid = self.pid()
        if pid is not None:
            fd = os.pidfd_open(pid)
            try:
                self.say("quit")
                if not _ended(fd, _PATIENCE):
                    raise InvalidState(
                        f"{CONTROL} (pid {pid}) waits for its clients to leave: end them, or `kill -9 {pid}`"
                    )
            finally:
                os.close(fd)
        shutil.rmtree(self.folder, ignore_errors=True)

    def servers(self) -> list[int]:
        """Pids of its servers; there is one once a client came."""
        return [int(word) for word in self.say("get_server_list").split() if word.isdigit()]

    def clients(self) -> list[int]:
        """Pids of the processes that are its clients now."""
        found = (self.say(f"get_client_list {server}").split() for server in self.servers())
        return [int(word) for words in found for word in words if word.isdigit()]

    # -- who uses it

    @contextlib.contextmanager
    def used(self, *, keep: bool = False) -> Iterator[dict[str, str]]:
        """It runs during the block, with the environment for clients; the last user to leave stops it. `keep`: it is
        not stopped by its users, but by :meth:`stop`."""
        with self._door():
            self.start()
            if keep:
                (self.folder / "kept").touch()
            users = self._users()
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield self.environment()
        finally:
            with self._door():
                os.close(users)
                if not (self.folder / "kept").exists() and self.unused():
                    self.stop()

    def unused(self) -> bool:
        """Whether no ``used`` block of any process is open."""
        users = self._users()
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(users)
        return True

    def _users(self) -> int:
        return os.open(self.runtime / "mps.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextlib.contextmanager
    def _door(self) -> Iterator[None]:
        """One at a time starts and stops it."""
        with open(self.runtime / "mps.lock", "a") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            yield

    def _control(self, arguments: list[str], said: str | None) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [CONTROL, *arguments],
                input=said,
                stdin=subprocess.DEVNULL if said is None else None,
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                env={**os.environ, **self.environment()},
            )
        except FileNotFoundError:
            raise Unsupported(f"there is no {CONTROL} on the PATH: it comes with NVIDIA's driver") from None
        except subprocess.TimeoutExpired:
            raise Unsupported(f"{CONTROL} did not answer within {_PATIENCE:g} s") from None

    def _logged(self) -> str:
        log = self.folder / "log" / "control.log"
        return log.read_text(errors="replace").strip()[-500:] if log.exists() else ""


def _ended(pidfd: int, seconds: float) -> bool:
    import select

    return bool(select.select([pidfd], [], [], seconds)[0])


def check_broker(directory: Path, environment: dict[str, str]) -> None:
    """A broker that runs already has to be a client as well: memory does not pass between clients and others."""
    pid = runtime.broker_pid(directory)
    if not pid:
        return
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={environment['CUDA_MPS_PIPE_DIRECTORY']}".encode()
    try:
        inside = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return
    if not inside:
        raise InvalidState(
            f"the broker (pid {pid}) that serves {directory} was not started under this MPS daemon, and memory does "
            "not pass between its clients and others: stop it first (`ipcsync broker --stop`)"
        )
