"""Who runs what: the worker processes of a pipeline, the channels that there really are between them, and where a
worker's marks are on the board. Pure: nothing here looks at the machine.

A stage with replicas has a channel of its own for each replica and output: ``edges.0``, ``edges.1``, ... for ``edges``.
A stage that reads ``edges`` reads them all, and puts the items in order. See ``order.py`` for how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from .schema import ChannelPlan, StagePlan

if TYPE_CHECKING:
    from .pipeline import Pipeline

Take = Literal["one", "ordered", "any", "latest"]
_READERS = 16  # as a channel has without asking


class InputPlan(Struct):
    """An input of a worker. ``take``: from the one channel, or how from those of the replicas that write it: in order,
    whichever comes (a replica, whose own items are put in order later), or the newest."""

    name: str
    channels: list[str]
    take: Take = "one"
    patient: bool = False  # its writer may be started again: wait for the next one
    floor: int = -1  # word of the board that says how far it has come in order; -1: nobody asks


class OutputPlan(Struct):
    """An output of a worker. A replica keeps within ``window`` items of the slowest of ``floors``."""

    name: str
    channel: str
    floors: list[int] = []
    window: int = 0


class WorkerPlan(Struct):
    """One process."""

    name: str
    stage: str
    inputs: list[InputPlan]
    outputs: list[OutputPlan]
    device: str | None
    group: str | None = None  # the reader group of its inputs
    marks: list[int] = []  # a replica's: words of the board where the replicas say what they finished last
    mark: int = -1  # ... and which of them is its own

    @property
    def replica(self) -> bool:
        return self.mark >= 0


class RealChannel(Struct):
    """A channel as it is created: ``plan`` is its table's name in the file."""

    plan: str
    depth: int
    max_readers: int


class Layout(Struct):
    """Everything that a run starts. ``words``: how many the board has."""

    workers: dict[str, WorkerPlan] = {}
    channels: dict[str, RealChannel] = {}
    words: int = 0


def replicas_of(name: str, stage: StagePlan) -> list[str]:
    """The names of a stage's workers, and the endings of the channels that they write."""
    return [name] if stage.replicas == 1 else [f"{name}.{k}" for k in range(stage.replicas)]


def lay_out(pipeline: Pipeline) -> Layout:
    """The workers and channels of a checked pipeline."""
    return _Drawing(pipeline).all()


class _Drawing:
    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.stages = pipeline, pipeline.stages
        self.writers = {channel: name for name, stage in self.stages.items() for channel in stage.outputs}
        self.readers: dict[str, list[str]] = {channel: [] for channel in pipeline.channels}
        for name, stage in self.stages.items():
            for channel in stage.inputs:
                self.readers[channel].append(name)
        self.words = 0
        self.floors = {
            (name, channel): self._word()
            for name, stage in self.stages.items()
            for channel in stage.inputs
            if stage.replicas == 1 and stage.policy == "block" and self._replicated(channel)
        }

    def _word(self) -> int:
        self.words += 1
        return self.words - 1

    def _replicated(self, channel: str) -> bool:
        return self.stages[self.writers[channel]].replicas > 1

    def all(self) -> Layout:
        layout = Layout()
        for name, stage in self.stages.items():
            marks = [self._word() for _ in range(stage.replicas)] if stage.replicas > 1 else []
            for k, worker in enumerate(replicas_of(name, stage)):
                layout.workers[worker] = WorkerPlan(
                    name=worker,
                    stage=name,
                    inputs=[self._input(name, stage, channel) for channel in stage.inputs],
                    outputs=[self._output(name, stage, channel, k) for channel in stage.outputs],
                    device=self.pipeline.device(stage, k),
                    group=name if grouped(stage) else None,
                    marks=marks,
                    mark=marks[k] if marks else -1,
                )
        for channel, plan in self.pipeline.channels.items():
            for real in self._channels(channel):
                layout.channels[real] = RealChannel(channel, self._depth(channel, plan), self._max_readers(channel))
        layout.words = self.words
        return layout

    def _channels(self, channel: str) -> list[str]:
        writer = self.stages[self.writers[channel]]
        return replicas_of(channel, writer) if writer.replicas > 1 else [channel]

    def _input(self, name: str, stage: StagePlan, channel: str) -> InputPlan:
        take: Take = "one"
        if self._replicated(channel):
            take = "any" if stage.replicas > 1 else "latest" if stage.policy == "latest" else "ordered"
        patient = self.stages[self.writers[channel]].restart == "on-failure"
        return InputPlan(channel, self._channels(channel), take, patient, self.floors.get((name, channel), -1))

    def _output(self, name: str, stage: StagePlan, channel: str, replica: int) -> OutputPlan:
        if stage.replicas == 1:
            return OutputPlan(channel, channel)
        return OutputPlan(channel, f"{channel}.{replica}", self._floors_behind(channel), self._window(name))

    def _floors_behind(self, channel: str) -> list[int]:
        """Who puts in order what comes of this channel: its readers, and those of replicas that read it."""
        found: set[int] = set()
        for name in self.readers[channel]:
            if self.stages[name].replicas > 1:
                found.update(*(self._floors_behind(each) for each in self.stages[name].outputs))
            elif (name, channel) in self.floors:
                found.add(self.floors[name, channel])
        return sorted(found)

    def _window(self, name: str) -> int:
        """How far ahead of the first unfinished item replicas may write. One for all replicas that read from each
        other, and a buffer in each of their channels for each item in it: so whoever has the item that everybody waits
        for finds a buffer for it, and nobody holds it up."""
        chain, new = {name}, [name]
        while new:
            each = new.pop()
            beside = [self.writers[channel] for channel in self.stages[each].inputs]
            beside += [reader for channel in self.stages[each].outputs for reader in self.readers[channel]]
            found = {other for other in beside if self.stages[other].replicas > 1} - chain
            chain |= found
            new += found
        depths = [self.pipeline.channels[channel].depth for each in chain for channel in self.stages[each].outputs]
        return max([*depths, *(self.stages[each].replicas for each in chain)])

    def _depth(self, channel: str, plan: ChannelPlan) -> int:
        return self._window(self.writers[channel]) if self._replicated(channel) else plan.depth

    def _max_readers(self, channel: str) -> int:
        """A cell for each reader, one for its successor while it is not gone, and one that keeps a group's place."""
        return min(256, max(_READERS, sum(2 * self.stages[name].replicas + 1 for name in self.readers[channel])))


def grouped(stage: StagePlan) -> bool:
    """Whether the stage reads as a group: replicas share the items, and of a stage that may be started again the
    supervisor keeps the place, so that no item is lost."""
    return stage.replicas > 1 or (stage.restart == "on-failure" and stage.policy == "block")
