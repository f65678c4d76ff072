"""Who runs what, planned without a machine: replicas, their channels and devices, who puts what in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipcsync_workers import graph
from ipcsync_workers.pipeline import Pipeline
from ipcsync_workers.plan import lay_out
from ipcsync_workers.schema import ChannelPlan, Settings, StagePlan


def pipeline(stages: dict[str, StagePlan], *, device: str = "auto", **depths: int) -> Pipeline:
    names = {channel for stage in stages.values() for channel in (*stage.inputs, *stage.outputs)}
    channels = {name: ChannelPlan(shape=(4,), dtype="uint8", depth=depths.get(name, 4)) for name in sorted(names)}
    return Pipeline(Path("/p/pipeline.toml"), Settings(device=device), channels, stages, {}, {})


def chain(*stages: StagePlan) -> dict[str, StagePlan]:
    """Stages one after the other, s0 -> c0 -> s1 -> c1 -> ..."""
    for k, stage in enumerate(stages):
        stage.inputs = (f"c{k - 1}",) if k else ()
        stage.outputs = (f"c{k}",) if k < len(stages) - 1 else ()
    return {f"s{k}": stage for k, stage in enumerate(stages)}


def test_without_replicas_everything_is_as_in_the_file():
    layout = lay_out(pipeline(chain(StagePlan(), StagePlan(restart="on-failure"), StagePlan())))
    assert list(layout.workers) == ["s0", "s1", "s2"]
    assert {name: (real.plan, real.depth, real.max_readers) for name, real in layout.channels.items()} == {
        "c0": ("c0", 4, 16),
        "c1": ("c1", 4, 16),
    }
    assert [worker.group for worker in layout.workers.values()] == [None, "s1", None]
    assert [each.patient for worker in layout.workers.values() for each in worker.inputs] == [False, True]
    assert layout.words == 0
    assert not any(worker.replica for worker in layout.workers.values())


def test_replicas_write_channels_of_their_own_that_their_reader_puts_in_order():
    layout = lay_out(pipeline(chain(StagePlan(), StagePlan(replicas=3), StagePlan()), c1=2))
    assert list(layout.workers) == ["s0", "s1.0", "s1.1", "s1.2", "s2"]
    assert list(layout.channels) == ["c0", "c1.0", "c1.1", "c1.2"]
    assert layout.channels["c1.2"].plan == "c1"
    assert layout.channels["c1.2"].depth == 3  # at least one for each that is under way
    two = layout.workers["s1.1"]
    assert (two.stage, two.group, two.replica) == ("s1", "s1", True)
    assert [(each.name, each.channels, each.take) for each in two.inputs] == [("c0", ["c0"], "one")]
    (output,) = two.outputs
    (last,) = layout.workers["s2"].inputs
    assert (output.name, output.channel, output.window) == ("c1", "c1.1", 3)
    assert (last.name, last.channels, last.take) == ("c1", ["c1.0", "c1.1", "c1.2"], "ordered")
    assert output.floors == [last.floor]
    words = [last.floor, *two.marks]
    assert sorted(words) == list(range(layout.words))
    assert [layout.workers[f"s1.{k}"].mark for k in range(3)] == two.marks


def test_replicas_of_replicas_wait_for_whoever_puts_it_in_order_in_the_end():
    stages = chain(StagePlan(), StagePlan(replicas=2), StagePlan(replicas=5), StagePlan())
    stages["s4"] = StagePlan(inputs=("c1",))  # and another reader half-way
    layout = lay_out(pipeline(stages, c1=8))
    half, end = layout.workers["s4"].inputs[0], layout.workers["s3"].inputs[0]
    assert layout.workers["s2.3"].inputs[0].take == "any"
    assert layout.workers["s1.0"].outputs[0].floors == sorted([half.floor, end.floor])
    assert layout.workers["s2.0"].outputs[0].floors == [end.floor]
    windows = {out.window for worker in layout.workers.values() for out in worker.outputs if worker.replica}
    assert windows == {8}  # of the whole chain: else one could be full of what the next may not write yet
    assert {real.depth for real in layout.channels.values() if real.plan in ("c1", "c2")} == {8}
    assert layout.channels["c0"].depth == 4


def test_nobody_waits_for_a_reader_that_takes_the_newest_or_that_shares():
    stages = chain(StagePlan(), StagePlan(replicas=2), StagePlan(policy="latest"))
    layout = lay_out(pipeline(stages))
    assert layout.workers["s2"].inputs[0].take == "latest"
    assert layout.workers["s1.0"].outputs[0].floors == []
    layout = lay_out(pipeline(chain(StagePlan(), StagePlan(replicas=2), StagePlan(replicas=2))))
    assert layout.workers["s1.0"].outputs[0].floors == []


def test_there_are_cells_for_all_readers_and_for_those_that_follow_them():
    layout = lay_out(pipeline(chain(StagePlan(), StagePlan(replicas=64), StagePlan())))
    assert layout.channels["c0"].max_readers == 129
    assert layout.channels["c1.63"].max_readers == 16


def test_a_device_for_each_replica():
    stages = chain(StagePlan(), StagePlan(replicas=3, device=("cuda:1", "cpu", "auto")), StagePlan(device="cpu"))
    layout = lay_out(pipeline(stages, device="cuda"))
    assert {name: worker.device for name, worker in layout.workers.items()} == {
        "s0": "cuda",
        "s1.0": "cuda:1",
        "s1.1": "cpu",
        "s1.2": None,
        "s2": "cpu",
    }


@pytest.mark.parametrize(
    ("change", "key", "part"),
    [
        ({"inputs": ()}, "replicas", "share the items of one input, and this stage has 0"),
        ({"inputs": ("c0", "cx")}, "replicas", "this stage has 2"),
        ({"policy": "latest"}, "policy", "'block'"),
        ({"device": ("cpu", "cpu")}, "device", "names 2 devices for 3 replicas"),
    ],
)
def test_what_replicas_cannot_be(change, key, part):
    stages = chain(StagePlan(), StagePlan(replicas=3), StagePlan())
    stages["sx"] = StagePlan(outputs=("cx",))
    for name, value in change.items():
        setattr(stages["s1"], name, value)
    found: list[tuple[tuple[str, ...], str]] = []
    graph.check(stages, {"c0", "c1", "cx"}, {}, lambda key, what: found.append((key, what)))
    assert [what for each, what in found if each == ("stages", "s1", key) and part in what]


def test_a_name_that_a_replica_needs_is_taken():
    stages = chain(StagePlan(), StagePlan(replicas=2), StagePlan())
    stages["s1.1"] = StagePlan(outputs=("c1.0",))
    found: list[str] = []
    graph.check(stages, {"c0", "c1", "c1.0"}, {}, lambda key, what: found.append(what))
    assert [what for what in found if "'s1.1' is needed for a replica of 's1'" in what]
    assert [what for what in found if "'c1.0' is needed for a replica of 'c1'" in what]


def test_a_list_of_devices_without_replicas():
    found: list[str] = []
    graph.check({"s": StagePlan(device=("cpu", "cpu"))}, set(), {}, lambda key, what: found.append(what))
    assert found == ["names 2 devices for 1 replicas: one for each, or one for all"]
