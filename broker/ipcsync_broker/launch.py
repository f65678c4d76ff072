"""Starting a broker: in this process (``serve``), or as a process of its own that outlives the caller (``start``)."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ipcsync import __version__, errors, guests, linux, runtime
from ipcsync.ledger import Header, new_token

from . import logs, takeover
from .model import Quotas, Recover
from .resources import Resources
from .server import Server
from .state import State

LOG = "broker.log"  # what a detached broker says
LONELY = 30.0  # seconds after which a lingering broker leaves if nobody ever came
STOP_WITHIN = 10.0
EXIT_RUNNING = 3


def serve(
    directory: Path | None = None,
    *,
    quotas: Quotas | None = None,
    linger: bool = False,
    http: str | None = None,
    tcp: str | None = None,
    allow_uids: frozenset[int] = frozenset(),
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Runs a broker in this process until it is told to stop (SIGTERM, SIGINT). ``BrokerRunning`` if one runs there.

    `linger`: it leaves with its last session. `http`: HOST:PORT of its page. `tcp`: ``tcp://HOST:PORT``, for
    those whose keys are allowed. `allow_uids`: others that it lets in. `ready` is called once it can be reached.
    """
    where = runtime.directory(directory, create=True)
    uids = allow_uids | {os.getuid()}
    runtime.check_contents(where, uids | runtime.let_in(where))  # a broker may run there, for others than we are to
    os.environ["IPCSYNC_RUNTIME_DIR"] = str(where)  # where the host backend puts memory
    # We run no kernels: a context with few hardware queues, whatever the session that started us has for itself.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    lock = runtime.Lock(where)
    lock.acquire()
    try:
        guests.admit(where, allow_uids - {os.getuid()})  # who is let in no more adds nothing to what is looked at
        runtime.check_contents(where, uids)
        opened = takeover.open_page(where, quotas or Quotas())
        boot = new_token()
        opened.ledger.set_boot(boot)
        opened.ledger.words[Header.PID] = os.getpid()
        opened.ledger.words[Header.START] = linux.start_time(os.getpid())
        resources = Resources(where, opened.ledger)
        state = State(
            boot=boot,
            facts=resources,
            uids=uids,
            pid_namespace=linux.pid_namespace(),
            now=time.monotonic(),
            quotas=opened.quotas,
            linger=LONELY if linger else None,
            version=__version__,
            ledger=runtime.LEDGER,
            announce=runtime.announce_endpoint(where),
            boot_id=linux.boot_id(),
        )
        lost = takeover.reopen(opened, state, resources) if opened.taken_over else None
        server = Server(where, lock, state, resources, opened.journal, tcp=tcp)
        if lost is not None:
            server.feed(Recover(lost))
        with page(http, where):
            server.serve(ready)
        opened.journal.close()
        if server.failed:
            raise errors.RuntimeDirectory(f"the broker left: {server.failed} in {where}", path=str(where))
        if not state.sessions:  # else they go on, and the next broker takes the page over
            takeover.sweep(where)
            (where / LOG).unlink(missing_ok=True)
            lock.release(unlink=True)
    finally:
        lock.release()


@contextmanager
def page(where: str | None, directory: Path) -> Iterator[None]:
    """The broker's page at HOST:PORT, for as long as it serves; None: no page."""
    if where is None:
        yield
        return
    from .http import Page

    made = Page(where, directory)
    logs.LOG.info("page at %s", made.url)
    try:
        yield
    finally:
        made.stop()


def start(
    directory: Path | None = None, *, linger: bool = False, options: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts a broker as a daemon of its own, and returns when it can be reached.

    `options` are those of ``ipcsync broker``. Raises what kept it from starting: ``BrokerRunning``, a
    ``RuntimeDirectory`` that cannot be used, or ``BrokerUnavailable`` with the end of what it said.
    """
    where = runtime.directory(directory, create=True)
    runtime.check_contents(where, runtime.let_in(where))
    pid = runtime.broker_pid(where)
    if pid is not None:
        raise errors.BrokerRunning(f"a broker (pid {pid}) already serves {where}", pid=pid)
    linux.keep_standard_descriptors()
    read, write = os.pipe()
    command = [sys.executable, "-m", "ipcsync_broker", "--runtime-dir", str(where), "--ready-fd", str(write), *options]
    with open(where / LOG, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as said:
        child = subprocess.Popen(
            [*command, "--linger"] if linger else command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            pass_fds=[write],
            cwd="/",
        )
    os.close(write)
    with open(read, "rb") as pipe:
        if pipe.read() == b"1":
            threading.Thread(target=child.wait, name="ipcsync-reaper", daemon=True).start()  # no zombie when it leaves
            return child
    child.wait()
    lines = (where / LOG).read_text(errors="replace").strip().splitlines()[-1:] if (where / LOG).exists() else []
    said_last = [line.removeprefix("ipcsync broker: ") for line in lines]
    if child.returncode == EXIT_RUNNING:
        raise errors.BrokerRunning(*said_last, pid=runtime.broker_pid(where) or 0)
    raise errors.BrokerUnavailable(f"the broker did not start (exit status {child.returncode}): {' '.join(said_last)}")


def stop(directory: Path | None = None) -> int:
    """Ends the broker of the directory and returns its pid; ``BrokerUnavailable`` when there is none, or it stays."""
    where = runtime.directory(directory, create=False)
    pid = runtime.broker_pid(where)
    if not pid:
        raise errors.BrokerUnavailable(
            f"no broker serves {where}" if pid is None else f"the broker of {where} runs in another pid namespace"
        )
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid
    try:
        if runtime.broker_pid(where) == pid:  # else the pid may be somebody else's by now
            try:
                signal.pidfd_send_signal(fd, signal.SIGTERM)
            except PermissionError:
                raise errors.PermissionDenied(f"the broker (pid {pid}) is another uid's: its owner stops it") from None
            if not select.select([fd], [], [], STOP_WITHIN + 2.0)[0]:
                raise errors.BrokerUnavailable(f"the broker (pid {pid}) does not leave: `kill -9 {pid}` ends it")
    finally:
        os.close(fd)
    return pid
