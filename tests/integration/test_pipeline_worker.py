"""``ipcsync worker``: a pipeline started by hand, a process a stage, against a running broker."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ipcsync

from ..harness import wait_until
from .pipelines import HEAD, PATIENCE, channel, stage

pytestmark = pytest.mark.watchdog(300)
COMMAND = [sys.executable, "-c", "from ipcsync.cli import main; main()", "worker"]
STAGES = """
import os, time
from ipcsync_workers import per_item

def numbers(stage):
    for n in range(stage.params.get("items", 10)):
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n

def endless(stage):
    n = 0
    while True:
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n
        if n == 0:
            print("begun", flush=True)
        n += 1

@per_item
def times(array, out, meta, *, xp, by=2):
    out[...] = xp.multiply(array, by)

def listed(stage):
    seen = []
    for slot in stage.input.slots():
        seen.append(int(slot.array[0]))
        if len(seen) == 1:
            print("first", flush=True)
    print("seen", len(seen), "sum", sum(seen), "in order" if seen == sorted(seen) else seen, flush=True)
    stage.count("listed", len(seen))

def fails(stage):
    for slot in stage.input.slots():
        print("failing", flush=True)
        raise ValueError("a planted failure")

def stuck(stage):
    for slot in stage.input.slots():
        print("stuck", flush=True)
        time.sleep(1000)
"""
FILE = HEAD + channel("a") + channel("b")


class Worker:
    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen([*COMMAND, *arguments], cwd=folder, stdout=out, stderr=out)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def saw(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.said) or self.process.poll() is not None, pattern, PATIENCE)
        assert re.search(pattern, self.said), self.said

    def end(self) -> int:
        return self.process.wait(PATIENCE)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    (tmp_path / "stages.py").write_text(STAGES)
    stages = (
        stage("one", "numbers", outputs="a", more="params = { items = 50 }")
        + stage("two", "times", inputs="a", outputs="b", more="params = { by = 3 }")
        + stage("three", "listed", inputs="b")
    )
    (tmp_path / "pipeline.toml").write_text(FILE + stages)
    started: list[Worker] = []

    def begin(*arguments: str) -> Worker:
        started.append(Worker(tmp_path, tmp_path / f"{len(started)}.log", *arguments))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


IN_FILE = ("--file", "pipeline.toml", "--device", "cpu")


def test_three_workers_started_by_hand(broker, start):
    source = start("stages:numbers", "--output", "a", "--param", "items=200", *IN_FILE)
    source.saw("waiting for 1 reader")
    middle = start("stages:times", "--input", "a", "--output", "b", "--param", "by=3", *IN_FILE)
    sink = start("stages:listed", "--input", "b", *IN_FILE)
    assert [each.end() for each in (source, middle, sink)] == [0, 0, 0], (source.said, middle.said, sink.said)
    assert f"seen 200 sum {3 * sum(range(200))} in order" in sink.said
    assert re.search(r"listed: 200 items in [\d.]+ s, 200 listed", sink.said)
    assert re.search(r"numbers: 200 items", source.said)


def test_the_stages_of_a_file(broker, start):
    workers = [start("--stage", name, *IN_FILE) for name in ("three", "two", "one")]
    assert [each.end() for each in workers] == [0, 0, 0], [each.said for each in workers]
    assert f"seen 50 sum {3 * sum(range(50))} in order" in workers[0].said


def test_channels_that_somebody_else_made(broker, session, start):
    with session.create_channel("mine", shape=(4,), dtype="int64", device="cpu") as made, made.reader() as reader:
        source = start("stages:numbers", "--output", "mine", "--device", "cpu")
        assert [slot.meta["n"] for slot in reader.slots()] == list(range(10))
        assert source.end() == 0, source.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains(broker, start, number):
    sink = start("stages:listed", "--input", "a", *IN_FILE)
    source = start("stages:endless", "--output", "a", *IN_FILE)
    sink.saw("first")
    source.process.send_signal(number)
    assert source.end() == 128 + number
    assert sink.end() == 0  # its stream has ended in order
    (made,) = re.findall(r"endless: ([\d,]+) items", source.said) or ["none"]
    assert f"listed: {made} items" in sink.said


def test_a_stage_that_waits_leaves_on_a_signal(broker, session, start):
    sink = start("stages:listed", "--input", "a", *IN_FILE)
    wait_until(lambda: "a" in session_channels(session), "the sink's channel")
    channel = session.open_channel("a")
    wait_until(lambda: channel.readers == 1, "its reader")
    with channel.writer() as writer:
        with writer.slot(meta={"n": 0}) as slot:
            slot.array[...] = 7
        sink.saw("first")
        sink.process.terminate()
        assert sink.end() == 143
    assert "seen 1 sum 7" in sink.said


def session_channels(session: ipcsync.Session) -> list[str]:
    try:
        session.open_channel("a", timeout=0.05).close()
    except ipcsync.errors.NotFound:
        return []
    return ["a"]


def test_a_second_signal_stops_at_once(broker, start):
    sink = start("stages:stuck", "--input", "a", *IN_FILE)
    source = start("stages:endless", "--output", "a", *IN_FILE)
    sink.saw("stuck")
    sink.process.terminate()
    sink.saw("once more")
    sink.process.terminate()
    assert sink.end() == 143
    source.process.terminate()
    assert source.end() == 143


def test_another_worker_goes_on_where_one_left_its_outputs_open(broker, start):
    sink = start("stages:listed", "--input", "a", "--patient", *IN_FILE)
    for _ in range(2):
        source = start("stages:endless", "--output", "a", "--keep-open", *IN_FILE)
        source.saw("begun")
        source.process.terminate()
        assert source.end() == 143
    last = start("stages:numbers", "--output", "a", "--param", "items=1", *IN_FILE)
    assert last.end() == 0
    assert sink.end() == 0
    assert "seen" in sink.said


def test_a_group_takes_over_what_one_failed_with(broker, start):
    members = [start("stages:fails", "--input", "a", "--group", "g", "--keep-open", *IN_FILE)]
    members.append(start("stages:listed", "--input", "a", "--group", "g", *IN_FILE))
    source = start("stages:numbers", "--output", "a", "--readers", "2", "--param", "items=100", *IN_FILE)
    assert source.end() == 0
    if "failing" in members[0].said:  # it may never have had an item
        assert members[0].end() == 1
        assert "ValueError: a planted failure" in members[0].said
        assert "ipcsync_workers" not in members[0].said
    assert members[1].end() == 0
    assert f"seen 100 sum {sum(range(100))}" in members[1].said


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "what is to run?"),
        (["stages:none"], "has no 'none'"),
        (["stages:times", "--input", "a"], "one --input and one --output"),
        (["stages:times", "--input", "a", "--output", "b", "--param", "bye=3"], "did you mean 'by'?"),
        (["stages:numbers", "--param", "nonsense"], "KEY=VALUE"),
        (["--stage", "one"], "--stage needs --file"),
        (["--file", "pipeline.toml", "--stage", "ones"], "did you mean 'one'?"),
        (["--file", "none.toml", "--stage", "one"], "no such file"),
    ],
)
def test_wrong_arguments(runtime, start, arguments, part):
    worker = start(*arguments)
    assert worker.end() == 2
    assert part in worker.said
    assert "Traceback" not in worker.said


def test_no_broker(runtime, start):
    worker = start("stages:listed", "--input", "a", "--timeout", "0.2")
    assert worker.end() == 3
    assert "no broker: " in worker.said


def test_no_channel(broker, start):
    worker = start("stages:listed", "--input", "nowhere", "--timeout", "5", "--device", "cpu")
    assert worker.end() == 1
    assert "nowhere" in worker.said


def test_a_failure_is_shown_from_the_users_own_function_on(broker, start):
    sink = start("stages:fails", "--input", "a", *IN_FILE)
    source = start("stages:numbers", "--output", "a", *IN_FILE)
    assert sink.end() == 1
    assert "stage 'fails' failed:" in sink.said
    assert "in fails" in sink.said
    assert "ipcsync_workers" not in sink.said
    assert source.end() == 0, source.said
