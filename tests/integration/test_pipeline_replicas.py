"""Replicas: what they write is in the order of what they read, whatever they leave out and whoever dies."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .pipelines import Run, channel, report, stage, starts

pytestmark = pytest.mark.watchdog(300)
STAGES = """
import os, time
from ipcsync_workers import per_item

def numbers(stage):
    for n in range(stage.resumed_at, stage.params.get("items", 10)):
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n

def endless(stage):
    n = stage.resumed_at
    while True:
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n
        n += 1

@per_item
def double(array, out, meta, *, xp, uneven=0.0):
    if meta["n"] % 5 == 0:
        time.sleep(uneven)  # the others have overtaken it by then
    out[...] = xp.multiply(array, 2)

def thinned(stage):
    "Leaves out every third item, in one of three ways."
    for slot in stage.input.slots():
        n = slot.meta["n"]
        if n % 9 == 3:
            continue
        with stage.output.slot(meta=slot.meta) as out:
            out.array[...] = slot.array
            if n % 9 == 6:
                out.discard()
            elif n % 9 == 0:
                out.discard()

def pairs(stage):
    "Makes one of two."
    while True:
        with stage.input.get() as one, stage.input.get() as two, stage.output.slot(meta=one.meta) as out:
            out.array[...] = two.array

def twice(stage):
    for slot in stage.input.slots():
        for _ in range(2):
            with stage.output.slot() as out:
                out.array[...] = 0

def once(stage):
    "Dies once, at item 7."
    params = stage.params
    for slot in stage.input.slots():
        n = slot.meta["n"]
        failing = n == 7 and not os.path.exists("failed")
        if failing and not params["published"]:
            die(params)
        with stage.output.slot(meta=slot.meta) as out:
            out.array[...] = slot.array
        if failing:
            die(params)

def die(params):
    open("failed", "w").close()
    if params["how"] == "raise":
        raise ValueError("a planted failure")
    os.kill(os.getpid(), 9)

def listed(stage):
    seen = []
    for slot in stage.input.slots():
        assert (slot.array == slot.meta["n"] * stage.params.get("times", 1)).all()
        if not seen:
            print("first", flush=True)
        seen.append(slot.meta["n"])
        if len(seen) == stage.params.get("limit"):
            break
    print("seen", len(seen), "in order" if seen == sorted(set(seen)) else seen, "up to", max(seen, default=None))

def tallied(stage):
    for slot in stage.input.slots():
        with open("tally", "a") as file:
            file.write(f"{slot.meta['n']}\\n")
        stage.count("tallied")

def either(stage):
    seen = {"a": [], "b": []}
    for name, slot in stage.each():
        seen[name].append(slot.meta["n"])
    print({name: (len(numbers), numbers == sorted(numbers)) for name, numbers in seen.items()})

def both(stage):
    for one, two in stage.step():
        assert one.meta["n"] == two.meta["n"]
        stage.count("steps")
"""


@pytest.fixture
def run(runtime: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starts(tmp_path, STAGES)


AGAIN = 'restart = "on-failure"\nrestart_delay = 0.01\n'


def line(call: str, more: str = "", *, items: int = 200, source: str = "numbers", sink: str = "listed") -> str:
    return (
        channel("a")
        + channel("b")
        + stage("one", source, outputs="a", more=f"params = {{ items = {items} }}")
        + stage("two", call, inputs="a", outputs="b", more=more)
        + stage("three", sink, inputs="b")
    )


def test_slow_and_fast_replicas_keep_the_order(run, tmp_path):
    more = "replicas = 3\nparams = { uneven = 0.01 }"
    made = run(line("double", more) + "params = { times = 2 }")
    assert made.end() == 0, made.err
    assert "seen 200 in order up to 199" in made.err
    found = report(tmp_path)["stages"]
    assert [found[name]["items"] for name in ("one", "two", "three")] == [200] * 3
    assert found["two"]["written"] == {"b": 200}
    for name in ("two.0", "two.1", "two.2"):
        assert re.search(rf"{name}\s+│\s+{found['two']['replicas'][name]['items']}\b", made.out)


def test_what_replicas_leave_out_holds_nobody_up(run, tmp_path):
    made = run(line("thinned", "replicas = 3"))
    assert made.end() == 0, made.err
    assert "seen 133 in order up to 199" in made.err
    found = report(tmp_path)["stages"]
    assert (found["two"]["items"], found["three"]["items"], found["three"]["missed"]) == (200, 133, 0)


def test_a_replica_that_makes_one_item_of_several_is_told(run):
    made = run(line("pairs", "replicas = 2"))
    assert made.end() == 1
    assert "it is done with one item before it takes the next" in made.err


def test_a_replica_that_writes_two_items_for_one_is_told(run):
    made = run(line("twice", "replicas = 2"))
    assert made.end() == 1
    assert "writes at most one item for each that it has taken" in made.err


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("published", [False, True])
def test_a_replica_that_dies_costs_nothing_but_time(run, tmp_path, how, published):
    params = f'params = {{ how = "{how}", published = {str(published).lower()} }}\n'
    made = run(line("once", f"replicas = 3\n{AGAIN}{params}"))
    assert made.end() == 0, made.err
    assert "seen 200 in order up to 199" in made.err
    found = report(tmp_path)["stages"]
    assert (found["two"]["restarts"], found["two"]["repeated"], found["two"]["missed"]) == (1, 1, 0)
    assert sum(each["restarts"] for each in found["two"]["replicas"].values()) == 1
    assert (found["two"]["items"], found["three"]["items"], found["three"]["missed"]) == (200, 200, 0)
    # Written by the dead one and by whoever got it then; unless that was itself, which knew.
    assert found["three"]["dropped"] == found["two"]["written"]["b"] - 200 <= int(published)


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_replicas_of_replicas(run, tmp_path, how):
    text = (
        "".join(channel(name) for name in "abcd")
        + stage("one", "numbers", outputs="a", more="params = { items = 300 }")
        + stage("two", "thinned", inputs="a", outputs="b", more=f"replicas = 3\n{AGAIN}")
        + stage("three", "once", inputs="b", outputs="c",
                more=f'replicas = 2\n{AGAIN}params = {{ how = "{how}", published = true }}')
        + stage("four", "double", inputs="c", outputs="d", more=f"replicas = 2\n{AGAIN}params = {{ uneven = 0.002 }}")
        + stage("five", "listed", inputs="d", more="params = { times = 2 }")
    )  # fmt: skip
    made = run(text)
    assert made.end() == 0, made.err
    assert "seen 200 in order up to 299" in made.err
    found = report(tmp_path)["stages"]
    assert [found[name]["restarts"] for name in ("two", "three", "four")] == [0, 1, 0]
    assert [found[name]["items"] for name in ("two", "three", "five")] == [300, 200, 200]
    # What two of them wrote, replicas may make something of twice; who puts it in order takes one.
    assert found["four"]["items"] + found["four"]["dropped"] == found["three"]["written"]["c"] in (200, 201)
    assert [found[name]["missed"] for name in ("two", "three", "four", "five")] == [0] * 4


def test_replicas_of_a_sink_get_each_item_once(run, tmp_path):
    text = channel("a") + stage("one", "numbers", outputs="a", more="params = { items = 100 }")
    made = run(text + stage("two", "tallied", inputs="a", more="replicas = 3"))
    assert made.end() == 0, made.err
    assert sorted(int(n) for n in (tmp_path / "tally").read_text().split()) == list(range(100))
    assert report(tmp_path)["stages"]["two"]["counts"] == {"tallied": 100}


def test_the_newest_of_what_replicas_make(run, tmp_path):
    made = run(line("double", "replicas = 2") + 'policy = "latest"\nparams = { times = 2 }')
    assert made.end() == 0, made.err
    found = report(tmp_path)["stages"]["three"]
    assert re.search(r"three +\| seen \d+ in order", made.err)
    assert found["items"] + found["missed"] == 200


def test_two_readers_of_what_replicas_make_each_see_all_of_it(run):
    more = "params = { times = 2 }"
    made = run(line("double", "replicas = 3") + more + "\n" + stage("four", "listed", inputs="b", more=more))
    assert made.end() == 0, made.err
    assert made.err.count("seen 200 in order") == 2


def test_a_reader_that_returns_early_does_not_hold_the_replicas(run, tmp_path):
    made = run(line("double", "replicas = 3") + "params = { times = 2, limit = 5 }")
    assert made.end() == 0, made.err
    found = report(tmp_path)["stages"]
    assert (found["two"]["items"], found["three"]["items"]) == (200, 5)


def test_an_interrupt_finishes_what_replicas_have_begun(run, tmp_path):
    made = run(line("double", "replicas = 3", source="endless") + "params = { times = 2 }")
    made.saw(r"three +\| first")
    made.signal(signal.SIGINT)
    assert made.end() == 130, made.err
    items = [each["items"] for each in report(tmp_path)["stages"].values()]
    assert items == [items[0]] * 3
    assert f"seen {items[0]} in order" in made.err


# -- devices


ON_GPU = [pytest.param("cuda", where, marks=pytest.mark.cuda) for where in ("cuda", "cpu")]


@pytest.mark.parametrize(
    ("device", "between"), [("cpu", "cpu"), pytest.param("cpu", "cuda", marks=pytest.mark.cuda), *ON_GPU]
)
def test_the_same_items_on_any_device(run, tmp_path, device, between):
    """Stages on one device and a channel between them on another: what arrives is what its checksum says."""
    filters, synthetic = "ipcsync_workers.stages.filters", "ipcsync_workers.stages.synthetic"
    frames = 'shape = [32, 32]\ndtype = "uint8"\n'
    made = run(
        f'[channels.a]\n{frames}[channels.b]\n{frames}device = "{between}"\n'
        + stage("one", f"{synthetic}:source", outputs="a", more="params = { items = 300 }")
        + stage(
            "two", f"{filters}:resize", inputs="a", outputs="b", more='replicas = 2\nparams = { method = "nearest" }'
        )
        + stage("three", f"{synthetic}:check", inputs="b"),
        "--set",
        f"pipeline.device={device}",
    )
    assert made.end() == 0, made.err
    assert report(tmp_path)["stages"]["three"]["counts"] == {"checked": 300}


# -- several inputs


def fork(sink: str, one: int, two: int) -> str:
    return (
        channel("a")
        + channel("b")
        + stage("one", "numbers", outputs="a", more=f"params = {{ items = {one} }}")
        + stage("two", "numbers", outputs="b", more=f"params = {{ items = {two} }}")
        + stage("three", sink, inputs="a b")
    )


def test_whichever_comes_first(run):
    made = run(fork("either", 30, 90))
    assert made.end() == 0, made.err
    assert "{'a': (30, True), 'b': (90, True)}" in made.err


def test_in_step(run, tmp_path):
    made = run(fork("both", 50, 50))
    assert made.end() == 0, made.err
    assert report(tmp_path)["stages"]["three"]["counts"] == {"steps": 50}


def test_inputs_out_of_step_are_named(run):
    made = run(fork("both", 50, 60))
    assert made.end() == 1
    assert "'a' ended after 50 items and other inputs have more" in made.err
