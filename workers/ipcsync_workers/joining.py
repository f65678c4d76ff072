"""A worker joins its channels: from the plan of a worker to a stage with inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import ipcsync
from ipcsync.device import Device, as_device

from .counters import Counters
from .order import Board, Gate
from .plan import InputPlan, OutputPlan, WorkerPlan
from .ports import Input, Output, arrived
from .sources import Last, Marks, Newest, One, Ordered, Source, Unordered
from .stage import Stage

if TYPE_CHECKING:
    from ipcsync import Reader, Session


def begin(
    worker: WorkerPlan,
    params: Mapping[str, Any],
    session: Session,
    stack: ExitStack,
    *,
    expected: Callable[[int], None] = lambda _: None,
    restarts: int = 0,
) -> Stage:
    """The stage of a worker, on its device, without inputs and outputs."""
    device = as_device(worker.device)
    # On the cpu the stage's stream is its own thread: what plain numpy code does is in order with the items.
    stream = None if device.type == "cpu" else stack.enter_context(ipcsync.Stream(device))
    stage = Stage(
        worker.stage, params=params, device=device, stream=stream, session=session, expected=expected, restarts=restarts
    )
    stage.arrived = lambda inputs, timeout: arrived(session, inputs, timeout)
    return stage


def join(
    worker: WorkerPlan, plan: InputPlan, stage: Stage, stack: ExitStack, *, policy: Literal["block", "latest"]
) -> list[Reader]:
    """The readers of an input: one for each of its channels."""
    death: Literal["raise", "wait"] = "wait" if plan.patient else "raise"
    found = []
    for name in plan.channels:
        channel = stage.session.open_channel(name)
        found.append(channel.reader(policy=policy, group=worker.group, on_writer_death=death))
        stack.enter_context(found[-1])
    return found


def attend(
    worker: WorkerPlan, plan: InputPlan, readers: list[Reader], stage: Stage, counters: Counters, board: Board
) -> None:
    """Gives the stage an input. Its outputs are there."""
    port, session = counters.inputs[plan.name], stage.session
    stream, elsewhere = _stream(stage, readers[0].device)
    finished = Marks(board, worker.marks, worker.mark) if worker.replica else Last({port.last} - {0})
    outputs: list[Any] = list(stage.outputs.values())
    source: Source
    if plan.take == "one":
        source = One(readers[0], stream, port, finished)
    elif plan.take == "ordered":
        source = Ordered(session, readers, stream, port, board, plan.floor)
    elif plan.take == "latest":
        source = Newest(session, readers, stream, port)
    else:

        def nothing(made: Any) -> None:
            for output in outputs:
                output.owe(made)
                output.over(made.number)

        source = Unordered(session, readers, stream, port, finished, nothing)
    stage.inputs[plan.name] = Input(
        source,
        port,
        stage,
        alone=len(worker.inputs) == 1,
        replica=outputs if worker.replica else None,
        elsewhere=elsewhere,
    )


def lead(
    worker: WorkerPlan,
    plan: OutputPlan,
    stage: Stage,
    stack: ExitStack,
    counters: Counters,
    board: Board,
    *,
    again: bool,
    keep_open: bool,
) -> None:
    """Gives the stage an output. Its channel ends as the stage ended; one that will be started again leaves it open
    when it failed or (run by hand) was asked to leave."""
    writer = stage.session.open_channel(plan.channel).writer()

    def leave(kind: type[BaseException] | None, error: BaseException | None, where: Any) -> None:
        left = stage.leaving is not None and stage.leaving.is_set()
        if keep_open and (left or error is not None):
            writer.detach()
        else:
            writer.__exit__(kind, error, where)

    stack.push(leave)
    stream, elsewhere = _stream(stage, writer.device)
    stage.outputs[plan.name] = Output(
        writer,
        counters.outputs[plan.name],
        stage,
        stream=stream,
        again=again,
        gate=Gate(board, plan.floors, plan.window) if worker.replica else None,
        elsewhere=elsewhere,
    )


def _stream(stage: Stage, device: Device) -> tuple[Any, bool]:
    """(the stream for a channel's turns, whether its device is another than the stage's)."""
    if device == stage.device:
        return stage.stream, False
    return None if device.type == "cpu" else ipcsync.Stream(device), True
