"""One stage in a process of its own: ``python -m ipcsync_workers.worker FD``, started by the supervisor.

Two threads: the main one runs the stage; the other listens to the supervisor, and when that is gone ends the process.
SIGTERM stops the stage where it is (as Ctrl-C would); the supervisor sends it when another stage has failed.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import ipcsync
from ipcsync import trace
from ipcsync.errors import PeerDied, SessionClosed

from . import messages
from .calls import CallInvalid, resolve
from .counters import Counters
from .joining import attend, begin, join, lead
from .order import Board
from .stage import Stage, run

_BROKER = 30.0  # seconds for the broker to answer: it may be just being started again
_GRACE = 3.0  # seconds that a stage has to leave by itself once its supervisor is gone


class Stopped(BaseException):
    """Raised in the stage by SIGTERM."""


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what cleans up is not to be interrupted again
    raise Stopped


def main(fd: int) -> int:
    """Runs one stage; the exit status is 0 when it returned."""
    os.set_inheritable(fd, False)
    end = socket.socket(fileno=fd)
    plan = messages.receive(end, messages.Plan)
    if plan is None:
        return 1
    signal.signal(signal.SIGTERM, _stop)
    for output in (sys.stdout, sys.stderr):
        assert isinstance(output, io.TextIOWrapper)
        output.reconfigure(errors="backslashreplace")  # a stage may print any file's name
    worker = plan.worker
    if plan.trace:
        trace.start(Path(plan.trace), worker.name)
    names = [each.name for each in worker.inputs], [each.name for each in worker.outputs]
    counters, board = Counters(plan.counters, *names), Board(plan.board, plan.words)
    counts: dict[str, int] = {}
    try:
        with ExitStack() as stack:
            stack.callback(trace.stop)
            _work(plan, end, counters, board, counts, stack)
    except BaseException as error:
        messages.send(end, _failure(error, counts, plan))
        return 1
    messages.send(end, messages.Done(counts))
    return 0


def _work(
    plan: messages.Plan,
    end: socket.socket,
    counters: Counters,
    board: Board,
    counts: dict[str, int],
    stack: ExitStack,
) -> None:
    os.chdir(plan.folder)  # params name paths relative to the file
    function = resolve(plan.call, Path(plan.folder))
    worker = plan.worker
    # From now on, so that a worker whose supervisor dies does not wait for channels that nobody will make.
    stages: list[Stage] = []
    draining, go = threading.Event(), threading.Event()
    threading.Thread(target=_listen, args=(end, stages, draining, go), name="supervisor", daemon=True).start()
    session = stack.enter_context(
        ipcsync.connect(
            plan.directory, name=worker.name, namespace=plan.namespace, timeout=_BROKER, default_timeout=None
        )
    )

    def expected(items: int) -> None:
        counters.expected = items

    stage = begin(worker, plan.params, session, stack, expected=expected, restarts=plan.restarts)
    stages.append(stage)
    stage.draining = stage.draining or draining.is_set()
    # Readers are given back after the writers are: a failed stage ends its outputs first.
    readers = [join(worker, each, stage, stack, policy=plan.policy) for each in worker.inputs]
    if plan.keep_open:
        stack.push(lambda kind, error, where: _abandon(error, plan))
    for output in worker.outputs:
        lead(worker, output, stage, stack, counters, board, again=plan.again, keep_open=plan.keep_open)
    if plan.restarts:
        stage.resumed_at = min((output.written for output in stage.outputs.values()), default=0)
    for each, found in zip(worker.inputs, readers, strict=True):
        attend(worker, each, found, stage, counters, board)

    def tell(kind: type[BaseException] | None, error: BaseException | None, where: Any) -> None:
        """Before the channels are left: nobody hears of the consequences of this failure before the failure."""
        counts.update(stage.counts)
        if error is not None:
            messages.send(end, _failure(error, counts, plan))

    stack.push(tell)
    messages.send(end, messages.Ready())
    go.wait()
    with trace.span("stage", worker.stage):  # replicas are one stage in a summary
        run(function, stage)
        for port in stage.inputs.values():
            port.finish()


def _abandon(error: BaseException | None, plan: messages.Plan) -> None:
    """A failed stage that is to be started again keeps what it had taken, so that it is given to it once more: to give
    its readers back in order would give the items back too. The broker frees what a process that is gone held."""
    if error is not None and not _failure(error, {}, plan).consequence:
        trace.stop()
        sys.stdout.flush()
        os._exit(1)


def _listen(end: socket.socket, stages: list[Stage], draining: threading.Event, go: threading.Event) -> None:
    while True:
        message = messages.receive(end, messages.FromSupervisor)
        if message is None:
            break
        if isinstance(message, messages.Drain):
            draining.set()
            for stage in stages:
                stage.draining = True
        go.set()
    # The supervisor is gone, and so is the terminal's Ctrl-C: nobody else would ever end this process.
    go.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE)
    os._exit(1)


def _failure(error: BaseException, counts: dict[str, int], plan: messages.Plan) -> messages.Failed:
    reached: BaseException | None = error
    while reached is not None:  # told to stop, and whatever else came up on the way out
        if isinstance(reached, Stopped | SessionClosed):
            return messages.Failed("", True, counts)
        reached = reached.__cause__ or reached.__context__
    peer = isinstance(error, PeerDied)
    # On a GPU what is made of a dead stage's unfinished items is condemned with them: where that one is started again,
    # so must this one be.
    mended = plan.keep_open and any(each.patient for each in plan.worker.inputs)
    return messages.Failed(explain(error), peer and not mended, counts, peer)


def explain(error: BaseException) -> str:
    """The traceback, from the user's first frame on: how a stage is called is not his to read."""
    if isinstance(error, CallInvalid):
        return str(error)
    ours = str(Path(__file__).parent) + os.sep
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename.startswith(ours):
        where = where.tb_next
    shown = traceback.TracebackException(type(error), error, where or error.__traceback__)
    text = "".join(shown.format())[-messages.LARGEST // 2 :]
    return text.encode(errors="backslashreplace").decode()  # files' names need not be UTF-8, messages must


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.exit(status)
