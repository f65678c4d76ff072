"""What must hold between the stages and channels of a pipeline. Pure: told what is wrong, it says so through `add`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .calls import CallInfo, did_you_mean
from .schema import StagePlan

Add = Callable[[tuple[str, ...], str], None]


def check(stages: Mapping[str, StagePlan], channels: set[str], calls: Mapping[str, CallInfo], add: Add) -> None:
    """Names every mistake of the graph: channels that are not there, writers, cycles, calls, params, replicas."""
    writers: dict[str, str] = {}
    used: set[str] = set()
    for name, stage in stages.items():
        for side in ("inputs", "outputs"):
            listed: tuple[str, ...] = getattr(stage, side)
            for channel in dict.fromkeys(listed):
                if channel not in channels:
                    add(("stages", name, side), f"there is no channel {channel!r}{did_you_mean(channel, channels)}")
                if listed.count(channel) > 1:
                    add(("stages", name, side), f"channel {channel!r} is named twice")
            used |= set(listed)
        for channel in dict.fromkeys(stage.outputs):
            if channel in writers:
                told = f"channel {channel!r} is already written by stage {writers[channel]!r}: a channel has one writer"
                add(("stages", name, "outputs"), told)
            writers.setdefault(channel, name)
        _check_call(name, stage, calls.get(stage.call, CallInfo()), add)
        _check_replicas(name, stage, {*stages, *channels}, add)
    for channel in sorted(channels - writers.keys()):
        told = "no stage writes it" if channel in used else "no stage uses it"
        add(("channels", channel), told)
    for cycle in _cycles(stages, writers):
        add(("stages", cycle[0], "inputs"), f"a cycle: {' -> '.join((*cycle, cycle[0]))}")


def _check_call(name: str, stage: StagePlan, info: CallInfo, add: Add) -> None:
    key = ("stages", name)
    if info.error:
        add((*key, "call"), info.error)
    if not info.per_item:
        return
    if len(stage.inputs) != 1 or len(stage.outputs) != 1:
        told = f"{stage.call!r} is per item: it needs one input and one output, not {len(stage.inputs)} and "
        add((*key, "call"), f"{told}{len(stage.outputs)}")
    for param in stage.params:
        if param not in info.keywords and not info.any_keyword:
            known = did_you_mean(param, info.keywords)
            add((*key, "params", param), f"{stage.call!r} takes no such keyword{known}")
    for keyword, needed in info.keywords.items():
        if needed and keyword not in stage.params:
            add((*key, "params"), f"{keyword!r} is missing: {stage.call!r} needs it")


def _check_replicas(name: str, stage: StagePlan, names: set[str], add: Add) -> None:
    key = ("stages", name)
    if isinstance(stage.device, tuple) and len(stage.device) != stage.replicas:
        told = f"names {len(stage.device)} devices for {stage.replicas} replicas: one for each, or one for all"
        add((*key, "device"), told)
    if stage.replicas == 1:
        return
    if len(stage.inputs) != 1:
        add((*key, "replicas"), f"replicas share the items of one input, and this stage has {len(stage.inputs)}")
    if stage.policy != "block":
        add((*key, "policy"), "replicas share every item: their policy is 'block'")
    for each in (name, *stage.outputs):
        taken = [f"{each}.{k}" for k in range(stage.replicas) if f"{each}.{k}" in names]
        for other in taken:
            add((*key, "replicas"), f"the name {other!r} is needed for a replica of {each!r}: rename what has it")


def upstream(stages: Mapping[str, StagePlan]) -> dict[str, list[str]]:
    """For every stage, those that write what it reads."""
    writers = {channel: name for name, stage in stages.items() for channel in stage.outputs}
    return {name: [writers[c] for c in stage.inputs if c in writers] for name, stage in stages.items()}


def _cycles(stages: Mapping[str, StagePlan], writers: Mapping[str, str]) -> list[list[str]]:
    """Each cycle once, as the stages on it in the order of flow, beginning with the one that the file names first."""
    before = {name: [writers[c] for c in stage.inputs if c in writers] for name, stage in stages.items()}
    after: dict[str, list[str]] = {name: [] for name in stages}
    for name, writers_of in before.items():
        for writer in writers_of:
            after[writer].append(name)
    found: list[list[str]] = []
    finished: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(trail[trail.index(name) :])
        elif name not in finished:
            for following in after[name]:
                walk(following, [*trail, name])
            finished.add(name)

    for name in stages:
        walk(name, [])
    return found
