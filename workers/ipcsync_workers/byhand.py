"""``ipcsync worker``: one stage against a running broker, without a supervisor."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import click

import ipcsync
from ipcsync.errors import (
    BrokerUnavailable,
    PeerDied,
    PermissionDenied,
    PipelineInvalid,
    RuntimeDirectory,
    SessionClosed,
)

from .calls import CallInfo, CallInvalid, describe, did_you_mean, resolve
from .cli import DONE, FAILED, INVALID, NO_BROKER
from .counters import Counters
from .joining import attend, begin, join, lead
from .order import Board
from .pipeline import Pipeline, load
from .plan import InputPlan, OutputPlan, WorkerPlan
from .schema import StagePlan
from .stage import Stage, run
from .worker import Stopped, explain

_LOOK = 0.02  # seconds


def work(
    *,
    call: str | None,
    inputs: Sequence[str],
    outputs: Sequence[str],
    params: Sequence[str],
    file: Path | None,
    stage: str | None,
    name: str | None,
    device: str | None,
    policy: Literal["block", "latest"] | None,
    group: str | None,
    readers: int,
    patient: bool,
    keep_open: bool,
    timeout: float,
    namespace: str | None,
    runtime_dir: Path | None,
) -> int:
    """What the command does; returns its exit status."""
    try:
        # The calls of other stages may not even be installed here.
        pipeline = load(file, inspect=lambda calls, folder: {}) if file else None
    except PipelineInvalid as error:
        click.echo(str(error), err=True)
        return INVALID
    plan = _stage_of(pipeline, stage)
    call = call or plan.call
    if not call:
        raise click.UsageError("what is to run? Give a CALL (module:function), or --file and --stage")
    device = device or (pipeline.device(plan) if pipeline else None)
    given = {**plan.params, **dict(map(_param, params))}
    wanted = WorkerPlan(
        name=name or stage or call.rpartition(":")[2],
        stage=stage or call.rpartition(":")[2],
        inputs=[InputPlan(each, [each], patient=patient) for each in inputs or plan.inputs],
        outputs=[OutputPlan(each, each) for each in outputs or plan.outputs],
        device=None if device == "auto" else device,
        group=group,
    )
    folder = pipeline.folder if pipeline else Path.cwd()
    try:
        _check(call, folder, wanted, given)
        function = resolve(call, folder)
    except CallInvalid as error:
        click.echo(f"{call}: {error}", err=True)
        return INVALID
    try:
        with _signals() as signals, ExitStack() as stack:
            session = stack.enter_context(
                ipcsync.connect(
                    runtime_dir, name=wanted.name, namespace=namespace, timeout=timeout, default_timeout=timeout
                )
            )
            made = begin(wanted, given, session, stack)
            made.leaving = signals.leaving
            signals.drain = lambda: setattr(made, "draining", True)
            _attach(wanted, made, pipeline, stack, policy=policy or plan.policy, keep_open=keep_open)
            if not _await_readers(wanted, session, readers, signals.leaving):
                return 128 + signals.number
            began = time.monotonic()
            run(function, made)
            for port in made.inputs.values():
                port.finish()
            _report(wanted.name, made, began)
    except Stopped:
        return 128 + signals.number
    except (BrokerUnavailable, RuntimeDirectory, PermissionDenied) as error:
        click.echo(f"no broker: {error}", err=True)
        return NO_BROKER
    except Exception as error:
        _tell(wanted.name, error)
        return FAILED
    return 128 + signals.number if signals.number else DONE


def _stage_of(pipeline: Pipeline | None, stage: str | None) -> StagePlan:
    if stage is None:
        return StagePlan()
    if pipeline is None:
        raise click.UsageError("--stage needs --file, the pipeline file that has it")
    if stage not in pipeline.stages:
        raise click.UsageError(f"{pipeline.path.name} has no stage {stage!r}{did_you_mean(stage, pipeline.stages)}")
    return pipeline.stages[stage]


def _param(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.UsageError(f"--param {text}: a parameter is KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _check(call: str, folder: Path, worker: WorkerPlan, params: dict[str, Any]) -> None:
    """What can be known before anything is opened."""
    info: CallInfo = describe(call, folder)
    if info.error:
        raise CallInvalid(info.error)
    if not info.per_item:
        return
    if len(worker.inputs) != 1 or len(worker.outputs) != 1:
        raise CallInvalid("it is per item: it needs one --input and one --output")
    for param in params:
        if param not in info.keywords and not info.any_keyword:
            raise CallInvalid(f"--param {param}: it takes no such keyword{did_you_mean(param, info.keywords)}")
    for keyword, needed in info.keywords.items():
        if needed and keyword not in params:
            raise CallInvalid(f"--param {keyword}=... is missing")


def _attach(
    worker: WorkerPlan,
    stage: Stage,
    pipeline: Pipeline | None,
    stack: ExitStack,
    *,
    policy: Literal["block", "latest"],
    keep_open: bool,
) -> None:
    if pipeline is not None:
        for name in [each.name for each in worker.inputs] + [each.name for each in worker.outputs]:
            if name in pipeline.channels:
                stack.enter_context(create(stage.session, pipeline, name))
    names = [each.name for each in worker.inputs], [each.name for each in worker.outputs]
    counters, board = Counters.create(*names), Board.create(0)
    readers = [join(worker, each, stage, stack, policy=policy) for each in worker.inputs]
    if keep_open:
        stack.push(lambda kind, error, where: _abandon(worker, error))
    for output in worker.outputs:
        lead(worker, output, stage, stack, counters, board, again=False, keep_open=keep_open)
    for each, found in zip(worker.inputs, readers, strict=True):
        attend(worker, each, found, stage, counters, board)


def _abandon(worker: WorkerPlan, error: BaseException | None) -> None:
    """What a failed stage had taken is given to others of its group, or whoever comes next, by the broker: to close the
    readers in order would give it back as done."""
    if isinstance(error, Exception) and not isinstance(error, PeerDied | SessionClosed):
        _tell(worker.name, error)
        sys.stdout.flush()
        os._exit(FAILED)


def _tell(name: str, error: Exception) -> None:
    click.echo(f"stage {name!r} failed:\n{explain(error).rstrip()}", err=True)


def create(session: Any, pipeline: Pipeline, name: str) -> Any:
    """The channel as the file has it, unless it is there."""
    plan = pipeline.channels[name]
    fields = {key: ipcsync.Field(f.shape, f.dtype) for key, f in plan.fields.items()}
    what: dict[str, Any] = {"fields": fields} if fields else {"shape": plan.shape, "dtype": plan.dtype}
    device = pipeline.device(plan)
    return session.create_channel(
        name, depth=plan.depth, meta_bytes=plan.meta_bytes, device=device, exist_ok=True, **what
    )


def _await_readers(worker: WorkerPlan, session: Any, wanted: int, leaving: threading.Event) -> bool:
    """What is written while nobody reads is lost, so a stage begins when somebody does. False: it is to leave."""
    for output in worker.outputs:
        channel = session.open_channel(output.channel)
        said = False
        while channel.readers < wanted:
            if not said:
                click.echo(f"{worker.name}: waiting for {wanted} reader(s) of {output.channel!r}", err=True)
                said = True
            if leaving.wait(_LOOK):
                return False
    return not leaving.is_set()


def _report(name: str, stage: Stage, began: float) -> None:
    counted = [port.finished for port in stage.inputs.values()] or [port.written for port in stage.outputs.values()]
    more = "".join(f", {n:,} {what}" for what, n in stage.counts.items())
    click.echo(f"{name}: {sum(counted):,} items in {time.monotonic() - began:.2f} s{more}", err=True)


class _Signals:
    """The first SIGINT or SIGTERM drains, the second stops."""

    def __init__(self) -> None:
        self.leaving = threading.Event()
        self.number = 0
        self.drain: Callable[[], None] = lambda: None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise Stopped
        self.number = number
        self.drain()
        self.leaving.set()
        print("finishing what was begun; once more to stop at once", file=sys.stderr, flush=True)


@contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
