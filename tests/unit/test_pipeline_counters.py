"""A worker's counters: shared with the supervisor, exact, and small."""

from __future__ import annotations

import os

import pytest

from ipcsync_workers.counters import Counters, percentile


def test_another_mapping_of_the_page_sees_what_was_counted():
    made = Counters.create(["a", "b"], ["c"])
    worker = Counters(os.dup(made.fd), ["a", "b"], ["c"])
    worker.inputs["b"].count(7, 1000)
    worker.inputs["b"].count(9, 24)
    worker.outputs["c"].count(1, 5)
    worker.expected = 12
    port = made.inputs["b"]
    assert (port.items, port.bytes, port.last) == (2, 1024, 9)
    assert (made.inputs["a"].items, made.outputs["c"].items, made.expected) == (0, 1, 12)
    worker.close()
    made.close()


@pytest.mark.parametrize("nanoseconds", [1, 2, 17, 999, 123_456, 5_000_000, 3_600_000_000])
def test_a_latency_is_found_again_within_six_percent(nanoseconds):
    made = Counters.create(["a"], [])
    made.inputs["a"].hop(nanoseconds)
    for share in (0.5, 0.99):
        assert percentile([made.inputs["a"].buckets], share) == pytest.approx(nanoseconds / 1e9, rel=0.07, abs=1e-9)
    made.close()


def test_percentiles_of_several_inputs_are_of_all_their_hops():
    made = Counters.create(["a", "b"], [])
    for _ in range(98):
        made.inputs["a"].hop(1000)
    for _ in range(2):
        made.inputs["b"].hop(1_000_000)
    buckets = [port.buckets for port in made.inputs.values()]
    assert percentile(buckets, 0.5) == pytest.approx(1e-6, rel=0.07)
    assert percentile(buckets, 0.98) == pytest.approx(1e-6, rel=0.07)
    assert percentile(buckets, 0.99) == pytest.approx(1e-3, rel=0.07)
    made.close()


def test_no_hop_has_no_latency_and_an_absurd_one_is_still_counted():
    made = Counters.create(["a"], [])
    assert percentile([made.inputs["a"].buckets], 0.5) is None
    made.inputs["a"].hop(0)
    made.inputs["a"].hop(-5)  # a clock that went back
    made.inputs["a"].hop(1 << 62)
    assert sum(made.inputs["a"].buckets) == 3
    made.close()
