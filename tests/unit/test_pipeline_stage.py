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
