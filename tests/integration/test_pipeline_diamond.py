"""A diamond: a source, two branches of which one has replicas, a join, and a sink. Every item once, in order, whole;
and what a kill of each of them costs is what the closing table says."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .pipelines import Run, channel, report, stage, starts

pytestmark = pytest.mark.watchdog(300)
STAGES = """
import os, zlib
import numpy as np
from ipcsync_workers import per_item

def log(stage, n):
    if not hasattr(stage, "log"):
        stage.log = os.open(stage.name + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        print("started", os.getpid(), flush=True)
    os.write(stage.log, f"{n}\\n".encode())

def base(n):
    return np.arange(n, n + 16, dtype=np.int64)

def source(stage):
    for n in range(stage.resumed_at, stage.params["items"]):
        log(stage, n)
        with stage.output.slot(meta={"n": n, "sum": zlib.crc32(base(n).tobytes())}) as slot:
            slot.array[...] = base(n)

def left(stage):
    for slot in stage.input.slots():
        log(stage, slot.meta["n"])
        with stage.output.slot(meta=slot.meta) as out:
            out.array[...] = slot.array

@per_item
def right(array, out, meta, *, stage, xp):
    log(stage, meta["n"])
    xp.multiply(array, 3, out=out)

def join(stage):
    for one, two in stage.step("lefts", "rights"):
        log(stage, one.meta["n"])
        assert one.meta["n"] == two.meta["n"], (one.meta, two.meta)
        with stage.output.slot(meta=two.meta) as out:
            out.array[...] = one.array + two.array

def sink(stage):
    due = stage.input.finished
    for slot in stage.input.slots():
        n = slot.meta["n"]
        log(stage, n)
        assert n == due, f"{due} was due, {n} came"
        assert zlib.crc32((slot.array // 4).tobytes()) == slot.meta["sum"], n
        due += 1
        stage.count("checked")
        if due % stage.params["every"] == 0:
            print("passed", due, flush=True)
"""
NAMES = ["source", "left", "right", "join", "sink"]
REPLICAS = ["right.0", "right.1", "right.2"]


@pytest.fixture
def run(runtime: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starts(tmp_path, STAGES)


def diamond(items: int, more: str = "", every: int = 500) -> str:
    return (
        "".join(channel(name, "[16]") for name in ("items", "lefts", "rights", "sums"))
        + stage("source", "source", outputs="items", more=f"params = {{ items = {items} }}\n{more}")
        + stage("left", "left", inputs="items", outputs="lefts", more=more)
        + stage("right", "right", inputs="items", outputs="rights", more=f"replicas = 3\n{more}")
        + stage("join", "join", inputs="lefts rights", outputs="sums", more=more)
        + stage("sink", "sink", inputs="sums", more=f"params = {{ every = {every} }}\n{more}")
    )


def logged(folder: Path, name: str) -> list[int]:
    return [int(line) for line in (folder / f"{name}.log").read_text().split()]


def test_every_item_once_and_in_order(run, tmp_path):
    made = run(diamond(10_000))
    assert made.end(250) == 0, made.err
    for name in NAMES:
        seen = logged(tmp_path, name)
        assert seen == list(range(10_000)) if name != "right" else sorted(seen) == list(range(10_000))
    found = report(tmp_path)["stages"]
    assert {name: found[name]["items"] for name in NAMES} == {**dict.fromkeys(NAMES, 10_000), "join": 20_000}
    assert all(found[name]["missed"] == found[name]["repeated"] == found[name]["dropped"] == 0 for name in NAMES)
    assert found["sink"]["counts"] == {"checked": 10_000}
    shares = {name: each["items"] for name, each in found["right"]["replicas"].items()}
    assert list(shares) == REPLICAS
    assert sum(shares.values()) == 10_000
    assert min(shares.values()) > 0


def test_one_of_each_killed_in_turn(run, tmp_path):
    items, victims = 10_000, ["source", "left", "right.1", "join", "sink"]
    made = run(diamond(items, 'restart = "on-failure"\nrestart_delay = 0.01'))
    for turn, victim in enumerate(victims, start=1):
        made.saw(rf"passed {turn * 1500}\b")
        pid = int(made.saw(rf"{victim} +\| started (\d+)")[1])
        os.kill(pid, signal.SIGKILL)
    assert made.end(250) == 0, made.err
    found = report(tmp_path)["stages"]
    assert {name: found[name]["restarts"] for name in NAMES} == dict.fromkeys(NAMES, 1)
    assert {name: each["restarts"] for name, each in found["right"]["replicas"].items()} == {
        name: int(name == "right.1") for name in REPLICAS
    }
    assert found["sink"]["items"] == found["join"]["written"]["sums"] == items
    for name in NAMES:
        seen = Counter(logged(tmp_path, name))
        assert sorted(seen) == list(range(items))  # nothing was lost ...
        assert found[name]["missed"] == 0  # ... and it says so
        again = seen.total() - items
        if name == "source":
            assert again <= 1  # what it was making when it was killed
        else:  # it may have been killed when it had taken an item and not yet written that down
            taken = found[name]["repeated"] // (2 if name == "join" else 1)
            assert again <= taken <= again + 1
            assert found[name]["items"] == items * (2 if name == "join" else 1)
