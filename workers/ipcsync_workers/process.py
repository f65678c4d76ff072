"""One worker process as its supervisor sees it: started, listened to, signalled, and its end explained."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from ipcsync import queues

from . import messages

_CHUNK = 1 << 16


class Process:
    """A running ``ipcsync_workers.worker``. ``outcome`` is its last word, None while it has not said it."""

    def __init__(self, plan: messages.Plan, say: Callable[[str], None]) -> None:
        self.ready = False
        self.outcome: messages.Done | messages.Failed | None = None
        self._say = say
        self._partial = b""
        self._signalled = False
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Its own process group: the terminal's Ctrl-C is for the supervisor, which drains. Spawned, never forked: CUDA
        # and threads do not survive a fork.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        queues.ask(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ipcsync_workers.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), plan.counters, plan.board),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            env=environment,
        )
        theirs.close()
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        messages.send(self.end, plan)

    def read_output(self) -> bool:
        """Says the lines that have come; False at the end of them."""
        with suppress(BlockingIOError):
            chunk = os.read(self.output.fileno(), _CHUNK)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            if not chunk and self._partial:
                lines.append(self._partial)
                self._partial = b""
            for line in lines:
                self._say(line.decode(errors="replace").rstrip("\r"))
            return bool(chunk)
        return True

    def read_message(self) -> bool:
        """Takes one message; False when there will be no more."""
        message = messages.receive(self.end, messages.FromWorker)
        if isinstance(message, messages.Ready):
            self.ready = True
        elif self.outcome is None:  # what comes up while a failed stage leaves is not why it failed
            self.outcome = message
        return message is not None

    def signal(self, number: int) -> None:
        """Signals the worker and whatever it started."""
        if self._process.poll() is None:
            self._signalled = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def finish(self) -> messages.Done | messages.Failed:
        """Called when its pidfd says that it is gone: takes what it left behind and lets everything go."""
        status = self._process.wait()
        while self.read_message():
            pass
        while select.select([self.output], [], [], 0)[0] and self.read_output():
            pass
        self.output.close()
        self.end.close()
        os.close(self.pidfd)
        if self.outcome is None and self._signalled:
            self.outcome = messages.Failed("", True)
        elif self.outcome is None or (status != 0 and isinstance(self.outcome, messages.Done)):
            self.outcome = messages.Failed(_ended(status), False, getattr(self.outcome, "counts", {}))
        return self.outcome


def _ended(status: int) -> str:
    if status >= 0:
        return f"the process ended with exit status {status}, without a word"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"the process was killed by {name}"
