"""Runs a pipeline: makes its channels, starts its workers, watches, restarts and stops them, and reports.

One thread, one loop. Nothing of an item passes through here: workers hand items to each other, the supervisor sees
their output, their ends, and the pages in which they count.
"""

from __future__ import annotations

import secrets
import selectors
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import ipcsync
from ipcsync import failpoints, runtime
from ipcsync.errors import DeviceUnavailable, IpcSyncError, OutOfSpace, QuotaExceeded

from . import messages
from .counters import Counters
from .keeper import Keeper
from .order import META_BYTES, OVER, Board
from .pipeline import Pipeline, invalid
from .plan import WorkerPlan, lay_out
from .process import Process
from .schema import StagePlan

_TICK = 0.1
_GRACE = 3.0  # seconds between asking a worker to leave and killing it
_BROKER_LEAVES = 10.0


def _failpoint(name: str) -> None:
    if failpoints.ARMED:
        failpoints.hit(name)


class Show(Protocol):
    """Where a run is shown."""

    def line(self, stage: str, text: str) -> None: ...
    def notice(self, text: str) -> None: ...
    def tick(self, stages: dict[str, StageRun]) -> None: ...


class StageRun:
    """A worker of a running pipeline, over all its restarts: a stage, or one of its replicas."""

    def __init__(self, worker: WorkerPlan, plan: StagePlan) -> None:
        self.name, self.worker, self.plan = worker.name, worker, plan
        self.counters = Counters.create(plan.inputs, plan.outputs)
        self.process: Process | None = None
        self.restarts = 0
        self.restart_at: float | None = None
        self.state = "starting"  # running, restarting, done, stopped (because of another), failed
        self.error = ""
        self.blamed = True  # its last failure was its own, and not that of a stage before it
        self.counts: dict[str, int] = {}
        self.ended = 0.0  # time.monotonic() when it ended

    @property
    def over(self) -> bool:
        return self.state in ("done", "stopped", "failed")


class Supervisor:
    """One run of a pipeline. :meth:`run` returns when everything it started is gone again."""

    def __init__(
        self,
        pipeline: Pipeline,
        show: Show,
        *,
        directory: Path | None = None,
        trace: Path | None = None,
        mps: bool = False,
    ) -> None:
        self.pipeline, self.show = pipeline, show
        self.trace = trace  # a folder: each worker writes its part of a trace there
        self.layout = lay_out(pipeline)
        self.board = Board.create(self.layout.words)
        self.stages = {
            name: StageRun(worker, pipeline.stages[worker.stage]) for name, worker in self.layout.workers.items()
        }
        self._places: dict[str, list[Any]] = {}  # by group: readers of ours, so that it lives while no worker does
        self.namespace = f"{pipeline.settings.name}-{secrets.token_hex(4)}"
        self.directory = runtime.directory(directory, create=True)
        self.mps = mps  # the workers share one MPS server
        self.device_lost = False  # ... and a dead one took the others' contexts along
        self.interrupted: int | None = None  # the signal that ended the run
        self.broker_restarts = 0
        self.began = self.ended = 0.0
        self._signals: list[int] = []
        self._handled = 0
        self._going = self._draining = self._stopping = False
        self._kill_at: float | None = None
        self._select = selectors.DefaultSelector()

    # -- the run

    def run(self) -> bool:
        """True when every stage was done. Errors of the broker (``BrokerUnavailable`` ...) are raised."""
        ours = runtime.broker_pid(self.directory) is None
        try:
            with self._listening(), self._session() as session, self._keeping(ours):
                self._create_channels(session)
                _failpoint("supervisor.channels")
                try:
                    self._supervise()
                finally:
                    self._abandon()
        finally:
            self._select.close()
            if ours:
                self._wait_for_broker()
        return all(stage.state == "done" for stage in self.stages.values())

    def close(self) -> None:
        """Lets the counters go: the last thing, when the run has been reported."""
        for stage in self.stages.values():
            stage.counters.close()
        self.board.close()

    def _session(self) -> Any:
        return ipcsync.connect(self.directory, name="supervisor", namespace=self.namespace, start_broker=True)

    @contextmanager
    def _keeping(self, ours: bool) -> Iterator[None]:
        """The broker that we started is started again should it die, for as long as our session is there. Somebody
        else's is theirs."""
        if not ours:
            yield
            return
        keeper = Keeper(self.directory, self.show.notice)
        try:
            yield
        finally:
            keeper.close()
            self.broker_restarts = keeper.restarts

    @contextmanager
    def _listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _create_channels(self, session: Any) -> None:
        """All channels exist before any worker does. What this machine cannot give is a mistake of the file."""
        problems, made = [], {}
        for name, real in self.layout.channels.items():
            plan = self.pipeline.channels[real.plan]
            fields = {key: ipcsync.Field(f.shape, f.dtype) for key, f in plan.fields.items()}
            what: dict[str, Any] = {"fields": fields} if fields else {"shape": plan.shape, "dtype": plan.dtype}
            try:
                made[name] = session.create_channel(
                    name,
                    depth=real.depth,
                    meta_bytes=plan.meta_bytes + (META_BYTES if name != real.plan else 0),
                    max_readers=real.max_readers,
                    device=self.pipeline.device(plan),
                    **what,
                )
            except (OutOfSpace, QuotaExceeded, DeviceUnavailable) as error:
                line = self.pipeline.lines.get(("channels", real.plan), 1)
                problems.append((line, f"channels.{real.plan}", str(error)))
        if problems:
            raise invalid(self.pipeline.path, problems)
        for worker in self.layout.workers.values():
            if worker.group and worker.group not in self._places:
                channels = [made[name] for each in worker.inputs for name in each.channels]
                self._places[worker.group] = [channel.reader(group=worker.group) for channel in channels]

    def _supervise(self) -> None:
        self.began = time.monotonic()
        for stage in self.stages.values():
            self._start(stage)
        while not all(stage.over for stage in self.stages.values()):
            for key, _ in self._select.select(_TICK):
                key.data()
            self._obey_signals()
            now = time.monotonic()
            for stage in self.stages.values():
                if stage.restart_at is not None and now >= stage.restart_at:
                    self._start(stage)
            if self._kill_at is not None and now >= self._kill_at:
                self._signal_all(signal.SIGKILL)
            self.show.tick(self.stages)
        self.ended = time.monotonic()
        _failpoint("supervisor.end")

    # -- workers

    def _start(self, stage: StageRun) -> None:
        stage.restart_at = None
        stage.state = "running" if self._going else "starting"
        plan = stage.plan
        again = plan.restart == "on-failure"
        process = stage.process = Process(
            messages.Plan(
                worker=stage.worker,
                call=plan.call,
                folder=str(self.pipeline.folder),
                directory=str(self.directory),
                namespace=self.namespace,
                params=plan.params,
                policy=plan.policy,
                counters=stage.counters.fd,
                board=self.board.fd,
                words=self.layout.words,
                again=again,
                keep_open=again and stage.restarts < plan.restart_limit,
                restarts=stage.restarts,
                trace="" if self.trace is None else str(self.trace),
            ),
            lambda text: self.show.line(stage.name, text),
        )
        self._select.register(process.end, selectors.EVENT_READ, lambda: self._heard(stage, process))
        self._select.register(process.output, selectors.EVENT_READ, lambda: self._said(process))
        self._select.register(process.pidfd, selectors.EVENT_READ, lambda: self._gone(stage, process))
        if self._draining:
            messages.send(process.end, messages.Drain())
        _failpoint("supervisor.started")

    def _said(self, process: Process) -> None:
        if not process.read_output():
            self._select.unregister(process.output)

    def _heard(self, stage: StageRun, process: Process) -> None:
        if not process.read_message():
            self._select.unregister(process.end)
        elif process.ready and stage.state == "starting":
            stage.state = "running"
            if all(each.state == "running" for each in self.stages.values()):
                self._going = True
                self.began = time.monotonic()
                for each in self.stages.values():
                    if each.process is not None:
                        messages.send(each.process.end, messages.Go())
        elif process.ready and self._going and process.outcome is None:
            messages.send(process.end, messages.Go())

    def _gone(self, stage: StageRun, process: Process) -> None:
        watched = self._select.get_map()
        for each in (process.end, process.output, process.pidfd):
            if each in watched:
                self._select.unregister(each)
        outcome = process.finish()
        stage.process = None
        stage.ended = time.monotonic()
        for what, n in outcome.counts.items():
            stage.counts[what] = stage.counts.get(what, 0) + n
        if isinstance(outcome, messages.Done):
            self._end(stage, "done")
            return
        stage.error, stage.blamed = outcome.traceback, not outcome.peer
        if self.mps and "DeviceLost" in outcome.traceback:
            # A client that died in the middle of a kernel took everybody's context along, the broker's memory too:
            # nothing of this run can be mended, all of it has to be started again.
            self.device_lost = True
            self._end(stage, "failed")
            self._stop()
            return
        if outcome.consequence:
            self._end(stage, "stopped")
            self._stop()
            return
        plan = stage.plan
        if plan.restart == "on-failure" and stage.restarts < plan.restart_limit and not self._stopping:
            delay = plan.restart_delay * 2**stage.restarts
            stage.restarts += 1
            stage.restart_at = stage.ended + delay
            stage.state = "restarting"
            _failpoint("supervisor.restart")
            for line in stage.error.rstrip().splitlines():
                self.show.line(stage.name, line)
            self.show.notice(
                f"stage {stage.name!r} failed; restart {stage.restarts} of {plan.restart_limit} in {delay:g} s"
            )
            return
        self._end(stage, "failed")
        self._stop()

    def _end(self, stage: StageRun, state: str) -> None:
        """It will not be started again: nobody keeps its place, or waits for what it might have finished."""
        stage.state = state
        for each in stage.worker.inputs:
            if each.floor >= 0:
                self.board[each.floor] = OVER
        group = stage.worker.group
        if all(each.over for each in self.stages.values() if each.worker.group == group):
            for place in self._places.pop(group or "", []):
                place.close()

    # -- stopping

    def _obey_signals(self) -> None:
        for number in self._signals[self._handled :]:
            self._handled += 1
            if not self._draining:
                self.interrupted = number
                self._drain()
                self.show.notice("finishing what was begun; once more to stop at once")
            elif not self._stopping:
                self._stop()
            else:
                self._signal_all(signal.SIGKILL)

    def _drain(self) -> None:
        """Sources make nothing new; the rest finish by themselves when their inputs end."""
        self._draining = True
        for stage in self.stages.values():
            if stage.process is not None:
                messages.send(stage.process.end, messages.Drain())
            elif stage.state == "restarting":
                stage.restart_at = time.monotonic()  # it has something to finish too

    def _stop(self) -> None:
        """Everything stops where it is, and what does not is killed."""
        if not self._stopping:
            self._stopping = True
            self._kill_at = time.monotonic() + _GRACE
            for stage in self.stages.values():
                if stage.state == "restarting":
                    stage.restart_at = None
                    self._end(stage, "failed" if stage.blamed else "stopped")
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for stage in self.stages.values():
            if stage.process is not None:
                stage.process.signal(number)

    def _abandon(self) -> None:
        """Whatever ends the run, an error of our own too, no worker outlives it."""
        for stage in self.stages.values():
            if stage.process is not None:
                stage.process.signal(signal.SIGKILL)
                stage.process.finish()
                stage.process = None

    def _wait_for_broker(self) -> None:
        """The broker that we started leaves with its last session; we leave after it. Should it die instead, another
        one finds what it had made, and leaves with that."""
        give_up = time.monotonic() + _BROKER_LEAVES
        while time.monotonic() < give_up:
            try:
                if runtime.broker_pid(self.directory) is None:
                    if not (self.directory / runtime.LEDGER).exists():
                        return
                    ipcsync.connect(self.directory, name="supervisor", start_broker=True).close()
            except (OSError, IpcSyncError):
                return
            time.sleep(0.01)
