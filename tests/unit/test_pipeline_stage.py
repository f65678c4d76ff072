"""Stages, run without a broker: what a stage function is given, and what a per_item function is."""

from __future__ import annotations

import numpy as np
import pytest

from ipcsync.errors import EndOfStream, InvalidState
from ipcsync_workers import Stage, per_item
from ipcsync_workers.stage import Drained, run
from ipcsync_workers.stages import synthetic
from ipcsync_workers.testing import run_stage


@per_item
def scale(array, out, meta, *, xp, stage, by=2):
    assert stage.xp is xp is np
    out[...] = xp.multiply(array, by)
    meta["by"] = by


def test_a_per_item_function_is_run_for_each_item_in_order():
    first, second = run_stage(scale, inputs=[np.arange(3), (np.arange(5), {"name": "x"})], params={"by": 3})
    assert (first.number, first.array.tolist(), first.meta) == (1, [0, 3, 6], {"by": 3})
    assert (second.number, second.array.tolist(), second.meta) == (2, [0, 3, 6, 9, 12], {"name": "x", "by": 3})


def test_a_per_item_function_stays_callable():
    out = np.zeros(2)
    scale(np.ones(2), out, {}, xp=np, stage=Stage("s", params={}, device=_cpu()))
    assert out.tolist() == [2, 2]


def _cpu():
    from ipcsync.device import as_device

    return as_device("cpu")


def test_an_output_has_the_shape_it_is_given():
    (item,) = run_stage(scale, inputs=[np.arange(4, dtype=np.uint8)], output=np.full(4, 9, np.uint16))
    assert item.array.dtype == np.uint16
    assert item.array.tolist() == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="broadcast"):
        run_stage(scale, inputs=[np.arange(4)], output=np.zeros(5))


def test_an_item_may_be_smaller():
    def shrink(stage):
        with stage.outputs["one"].slot() as out:
            out.resize((2,))
            out.array[...] = 1
        with stage.outputs["two"].slot() as out:
            out.resize("a", (1, 3))
            out["a"][...] = 2

    like = {"one": np.zeros(4), "two": {"a": np.zeros((2, 3)), "b": np.zeros(1)}}
    found = run_stage(shrink, outputs=like)
    assert found["one"][0].array.tolist() == [1, 1]
    assert found["two"][0]["a"].tolist() == [[2, 2, 2]]
    assert found["two"][0]["b"].shape == (1,)


def test_a_per_item_function_that_returns_its_result_is_told():
    @per_item
    def wrong(array, out, meta):
        return array

    with pytest.raises(TypeError, match="in place"):
        run_stage(wrong, inputs=[np.ones(1)])


def test_inputs_are_read_only():
    @per_item
    def wrong(array, out, meta):
        array[...] = 1

    with pytest.raises(ValueError, match="read-only"):
        run_stage(wrong, inputs=[np.zeros(1)])


def test_fields_several_inputs_and_outputs():
    def join(stage):
        for left in stage.inputs["left"].slots():
            with stage.inputs["right"].get() as right, stage.outputs["sum"].slot() as out:
                out["total"][...] = left.array + right["b"]
            with stage.outputs["log"].slot(meta={"n": left.number}) as out:
                if left.number == 2:
                    out.discard()

    found = run_stage(
        join,
        {"left": [np.ones(2), np.zeros(2)], "right": [{"a": 0, "b": np.ones(2)}] * 2},
        outputs={"sum": {"total": np.zeros(2)}, "log": np.zeros(1)},
    )
    assert [item["total"].tolist() for item in found["sum"]] == [[2, 2], [1, 1]]
    assert [item.meta for item in found["log"]] == [{"n": 1}]
    with pytest.raises(InvalidState, match=r"2 inputs \('left', 'right'\)"):
        run_stage(lambda stage: stage.input, {"left": [], "right": []})


def test_get_after_the_last_item_is_the_end_of_the_stream():
    def one_too_many(stage):
        with stage.input.get():
            pass
        with stage.input.get():
            pass

    with pytest.raises(EndOfStream):
        run_stage(one_too_many, inputs=[np.ones(1)])


def test_a_source_that_is_drained_ends_as_if_it_had_returned():
    def source(stage):
        try:
            raise Drained  # as slot() does once the run is asked to end
        except Exception:
            pytest.fail("a source's except Exception must not swallow it")

    stage = Stage("s", params={}, device=_cpu())
    stage.draining = True
    run(source, stage)
    stage.draining = False
    with pytest.raises(Drained):
        run(source, stage)


def test_the_synthetic_source_and_its_check():
    like = {"a": np.zeros((3, 5), np.float32), "b": np.zeros((), np.int16), "c": np.zeros(7, bool)}
    items = run_stage(synthetic.source, output=like, params={"items": 4})
    assert [item.meta["index"] for item in items] == [0, 1, 2, 3]
    given = [(item.value, item.meta) for item in items]
    assert run_stage(synthetic.check, inputs=given) == []
    with pytest.raises(ValueError, match="item 1 was due, and 2 came"):
        run_stage(synthetic.check, inputs=[given[0], given[2]])
    assert run_stage(synthetic.check, inputs=[given[0], given[2]], params={"ordered": False}) == []
    given[1][0]["a"][1, 1] += 1
    with pytest.raises(ValueError, match="item 1: 'a' has checksum"):
        run_stage(synthetic.check, inputs=given)


# -- several inputs


def items(*numbers):
    return [(np.full(1, n), {"n": n}) for n in numbers]


def test_inputs_in_step():
    def join(stage):
        for right, left in stage.step("right", "left"):
            with stage.output.slot() as out:
                out.array[...] = 10 * left.array + right.array

    found = run_stage(join, {"left": items(1, 2, 3), "right": items(4, 5, 6)}, output=np.zeros(1))
    assert [item.array[0] for item in found] == [14, 25, 36]


def test_inputs_that_are_not_in_step():
    def join(stage, **how):
        for left, right in stage.step(**how):
            stage.count(f"{left.meta['n']}-{right.meta['n']}")
        stages.append(stage)

    stages: list[Stage] = []
    with pytest.raises(InvalidState, match="'b' ended after 1 items and other inputs have more"):
        run_stage(join, {"a": items(1, 2), "b": items(3)})
    with pytest.raises(InvalidState, match="'a' ended after 1 items"):
        run_stage(join, {"a": items(1), "b": items(3, 4)})
    run_stage(lambda stage: join(stage, strict=False), {"a": items(1, 2), "b": items(3)})
    assert [stage.counts for stage in stages] == [{"1-3": 1}]


def test_when_the_run_is_ended_a_step_may_be_left_unfinished():
    def join(stage):
        for _ in stage.step():
            stage.draining = True  # two sources do not stop at the same item

    run_stage(join, {"a": items(1, 2, 3), "b": items(1)})


def test_whichever_input_has_something():
    def merge(stage):
        for name, slot in stage.each("a", "b"):
            with stage.output.slot(meta={"from": name}) as out:
                out.array[...] = slot.array

    found = run_stage(merge, {"a": items(1, 2, 3), "b": items(4), "c": items(9)}, output=np.zeros(1))
    assert [(item.meta["from"], item.array[0]) for item in found] == [("a", 1), ("b", 4), ("a", 2), ("a", 3)]


def test_an_input_that_is_not_there():
    with pytest.raises(InvalidState, match="has no input 'x'; it has 'a', 'b'"):
        run_stage(lambda stage: list(stage.each("x")), {"a": [], "b": []})


def test_where_a_source_goes_on():
    def source(stage):
        for n in range(stage.resumed_at, 5):
            with stage.output.slot() as out:
                out.array[...] = n

    found = run_stage(source, output=np.zeros(1))
    assert [item.array[0] for item in found] == [0, 1, 2, 3, 4]
    found = run_stage(source, output=np.zeros(1), resumed_at=3)
    assert [item.array[0] for item in found] == [3, 4]


# -- devices


class OnGpu:
    """As much of a CuPy array as the stage looks at."""

    def __init__(self, index: int) -> None:
        self.device = type("Device", (), {"id": index})()
        self.__cuda_array_interface__ = {}

    def copy(self):
        return OnGpu(7)


def test_what_is_here_and_what_is_elsewhere():
    from ipcsync.device import Device

    cpu, gpu = (Stage("s", params={}, device=Device(kind, index)) for kind, index in (("cpu", 0), ("cuda", 1)))
    host, own, other = np.zeros(1), OnGpu(1), OnGpu(0)
    assert [cpu.is_here(array) for array in (host, own, other)] == [True, False, False]
    assert [gpu.is_here(array) for array in (host, own, other)] == [False, True, False]
    assert cpu.here(host) is host
    assert gpu.here(own) is own
    assert gpu.here(other).device.id == 7  # its copy
    out = np.zeros(2)
    cpu.put(out, np.ones(2))
    assert out.tolist() == [1, 1]
