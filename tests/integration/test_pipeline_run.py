"""``ipcsync run`` as a user has it: a command, its output, its exit status, and nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..harness import files_of, processes_of, wait_until
from .pipelines import PATIENCE, Run, channel, report, stage, starts

SYNTHETIC = "ipcsync_workers.stages.synthetic"
pytestmark = pytest.mark.watchdog(300)
STAGES = """
import os, time
from ipcsync_workers import per_item

@per_item
def double(array, out, meta, *, xp):
    out[...] = xp.multiply(array, 2)

def numbers(stage):
    for n in range(stage.params.get("items", 10)):
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n

def started():
    print("started", os.getpid(), flush=True)

def relay(stage):
    started()
    for slot in stage.input.slots():
        with stage.output.slot(meta=slot.meta) as out:
            out.array[...] = slot.array

def endless(stage):
    started()
    n = 0
    try:
        while True:
            with stage.output.slot(meta={"n": n}) as slot:
                slot.array[...] = n
            n += 1
    finally:
        print("made", n, flush=True)

def listed(stage):
    started()
    seen = []
    for slot in stage.input.slots():
        assert (slot.array == slot.meta["n"] * stage.params.get("times", 1)).all()
        if not seen:
            print("first", flush=True)
        seen.append(slot.meta["n"])
    print("seen", len(seen), "in order" if seen == sorted(set(seen)) else seen)

def pause(stage):
    print("pausing", os.getpid())
    time.sleep(1000)

def raises(stage):
    for slot in stage.input.slots():
        if slot.meta["n"] == 3:
            stage_fails_here()

def stage_fails_here():
    raise ValueError("a planted failure")

def dies(stage):
    for slot in stage.input.slots():
        if slot.meta["n"] == 3:
            os.kill(os.getpid(), 9)

def leaves(stage):
    os._exit(7)

def once(stage):
    params, marker = stage.params, stage.params["marker"]
    for turn, slot in enumerate(stage.input.slots()):
        if turn == 0:
            print("begun", slot.meta["n"], flush=True)
        failing = slot.meta["n"] == 3 and not os.path.exists(marker)
        if not failing or params["published"]:
            with stage.output.slot(meta=slot.meta) as out:
                out.array[...] = slot.array
        if failing:
            open(marker, "w").close()
            if params["how"] == "raise":
                raise ValueError("a planted failure")
            os.kill(os.getpid(), 9)
"""


@pytest.fixture
def run(runtime: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starts(tmp_path, STAGES + PEER)


LINE = channel("a") + channel("b") + stage("one", "numbers", outputs="a")
DOUBLED = LINE + stage("two", "double", inputs="a", outputs="b")
ENDLESS = LINE.replace("numbers", "endless")
DONE = DOUBLED + stage("three", "listed", inputs="b", more="params = { times = 2 }")


def test_a_pipeline_runs_to_its_end_and_shows_its_table(run, tmp_path, runtime):
    made = run(DONE, "--set", "stages.one.params.items=50")
    assert made.end() == 0, made.err
    assert "three | seen 50 in order" in made.err
    for word in ("test: done", "one", "two", "three", "items", "hop p50", "hop p99", "bytes", "restarts"):
        assert word in made.out
    found = report(tmp_path)
    assert found["status"] == "done"
    assert [each["items"] for each in found["stages"].values()] == [50, 50, 50]
    assert [each["bytes"] for each in found["stages"].values()] == [50 * 32] * 3
    assert found["stages"]["one"]["latency_p50"] is None
    assert 0 < found["stages"]["three"]["latency_p50"] <= found["stages"]["three"]["latency_p99"] < 10
    assert files_of(runtime, ()) == []


def test_two_readers_of_a_channel_see_every_item(run, tmp_path):
    made = run(DONE + stage("four", "listed", inputs="b", more="params = { times = 2 }"))
    assert made.end() == 0, made.err
    assert {line for line in made.err.splitlines() if "seen" in line} == {
        "three | seen 10 in order",
        "four  | seen 10 in order",
    }


def test_a_thousand_items_arrive_whole_and_in_order(run, tmp_path):
    made = run(
        channel("a", "[1024]")
        + stage("source", f"{SYNTHETIC}:source", outputs="a", more="params = { items = 1000 }")
        + stage("sink", f"{SYNTHETIC}:check", inputs="a")
    )
    assert made.end() == 0, made.err
    assert report(tmp_path)["stages"]["sink"]["counts"] == {"checked": 1000}
    assert "1,000 checked" in made.out


def test_a_running_broker_is_used_and_left_running(run, broker):
    made = run(DONE)
    assert made.end() == 0, made.err
    assert broker.process.poll() is None


# -- failures


def test_a_stage_that_raises_is_shown_with_its_traceback_and_the_others_stop(run, tmp_path):
    made = run(ENDLESS + stage("two", "raises", inputs="a") + stage("s", "pause", outputs="b"))
    assert made.end() == 1
    assert "stage 'two' failed:" in made.err
    assert "in stage_fails_here" in made.err
    assert 'raise ValueError("a planted failure")' in made.err
    assert "ValueError: a planted failure" in made.err
    assert "ipcsync_workers" not in made.err  # the traceback begins at the user's own function
    assert "stage 'one'" not in made.err
    found = report(tmp_path)
    assert (found["status"], found["failed"]) == ("failed", ["two"])
    assert "test: failed" in made.out


def test_what_reads_from_a_failed_stage_is_not_blamed(run, tmp_path):
    made = run(ENDLESS + stage("two", "leaves", inputs="a", outputs="b") + stage("three", "listed", inputs="b"))
    assert made.end() == 1
    assert report(tmp_path)["failed"] == ["two"]
    assert "exit status 7" in made.err
    assert "stage 'three'" not in made.err


def test_a_stage_that_is_killed_is_named_with_the_signal(run):
    made = run(LINE + stage("two", "dies", inputs="a", outputs="b") + stage("three", "listed", inputs="b"))
    assert made.end() == 1
    assert "stage 'two' failed:\nthe process was killed by SIGKILL" in made.err


def test_every_mistake_of_a_wrong_file_and_nothing_is_started(run, runtime):
    text = channel("a", "[0]") + channel("b") + stage("one", "none", outputs="a b", more="colour = 1")
    made = run(text + stage("two", "double", inputs="c", outputs="b"))
    assert made.end() == 2
    for line, key in ((6, "channels.a.shape"), (12, "stages.one.call"), (15, "stages.one.colour")):
        assert f"pipeline.toml:{line}: {key}: " in made.err
    assert "stages.two.inputs: there is no channel 'c'" in made.err
    assert "already written by stage 'one'" in made.err
    assert "Traceback" not in made.err
    assert list(runtime.iterdir()) == []


def test_wrong_arguments(run, tmp_path):
    assert run(DONE, "--set", "nonsense").end() == 2
    assert run(DONE, "--frobnicate").end() == 2
    assert run(DONE, "--json", str(tmp_path / "no" / "such.json")).end() == 2


def test_a_channel_larger_than_the_machine_is_a_mistake_of_the_file(run):
    made = run(channel("a", "[1000000000, 100]") + stage("one", "numbers", outputs="a"))
    assert made.end() == 2
    assert "pipeline.toml:5: channels.a: " in made.err


def test_no_broker_can_be_had(run, monkeypatch, tmp_path):
    elsewhere = tmp_path / "not-tmpfs" if os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev else Path("/proc/x")
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(elsewhere))
    made = run(DONE)
    assert made.end() == 3
    assert "no broker: " in made.err


# -- restarts


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("published", [False, True])
def test_a_failed_stage_is_started_again_and_loses_nothing(run, tmp_path, how, published):
    marker = tmp_path / "failed"
    params = f'{{ marker = "{marker}", how = "{how}", published = {str(published).lower()} }}'
    more = f'params = {params}\nrestart = "on-failure"\nrestart_delay = 0.01'
    text = LINE + stage("two", "once", inputs="a", outputs="b", more=more) + stage("three", "listed", inputs="b")
    made = run(text, "--set", "stages.one.params.items=200")
    assert made.end() == 0, made.err
    made.saw("restart 1 of 3")
    made.saw(r"two +\| begun 0\n(.*\n)*?two +\| begun 3\n")  # it is given what it had not finished
    found = report(tmp_path)["stages"]
    assert found["one"]["items"] == found["two"]["items"] == 200
    assert (found["two"]["restarts"], found["two"]["missed"], found["two"]["repeated"]) == (1, 0, 1)
    # What it had published of the item before it failed is not published again.
    assert found["three"]["items"] == found["two"]["written"]["b"] == 200
    assert "seen 200 in order" in made.err


@pytest.mark.parametrize("victim", ["one", "two", "three"])
def test_a_worker_that_is_killed_is_started_again(run, tmp_path, victim):
    again = 'restart = "on-failure"\nrestart_delay = 0.01'
    made = run(
        channel("a")
        + channel("b")
        + stage("one", "endless", outputs="a", more=again)
        + stage("two", "relay", inputs="a", outputs="b", more=again)
        + stage("three", "listed", inputs="b", more=again)
    )
    made.saw(r"three +\| first")
    pid = int(made.saw(rf"{victim} +\| started (\d+)")[1])
    os.kill(pid, signal.SIGKILL)
    made.saw(rf"{victim} +\| the process was killed by SIGKILL\n(.*\n)*?{victim} +\| started")
    made.signal(signal.SIGINT)
    assert made.end() == 130, made.err
    found = report(tmp_path)["stages"]
    assert {name: each["restarts"] for name, each in found.items()} == {name: int(name == victim) for name in found}
    assert [each["missed"] for each in found.values()] == [0, 0, 0]  # what was written was read


PEER = """
def bereaved(stage):
    from ipcsync.errors import PeerDied
    for slot in stage.input.slots():
        with stage.output.slot(meta=slot.meta) as out:
            out.array[...] = slot.array
        if slot.meta["n"] == 3 and not stage.restarts:
            raise PeerDied("as on a GPU, where what was made of a dead one's items is condemned", session="one", pid=1)
"""


def test_a_stage_that_a_death_before_it_took_along_is_started_again_too(run, tmp_path):
    again = 'restart = "on-failure"\nrestart_delay = 0.01'
    text = LINE.replace('call = "stages:numbers"', f'call = "stages:numbers"\n{again}')
    text += stage("two", "bereaved", inputs="a", outputs="b", more=again) + stage("three", "listed", inputs="b")
    made = run(text, "--set", "stages.one.params.items=50")
    assert made.end() == 0, made.err
    assert "three | seen 50 in order" in made.err
    found = report(tmp_path)["stages"]
    assert (found["two"]["restarts"], found["two"]["repeated"], found["three"]["missed"]) == (1, 1, 0)


def test_a_death_that_nobody_mends_stops_what_reads_from_it(run, tmp_path):
    text = LINE + stage("two", "bereaved", inputs="a", outputs="b", more='restart = "on-failure"')
    made = run(text + stage("three", "listed", inputs="b"))
    assert made.end() == 1
    found = report(tmp_path)
    assert (found["stages"]["two"]["restarts"], found["stages"]["two"]["state"]) == (0, "stopped")


def test_a_stage_that_goes_on_failing_ends_the_run(run, tmp_path):
    more = 'restart = "on-failure"\nrestart_delay = 0.01\nrestart_limit = 2'
    made = run(LINE + stage("two", "leaves", inputs="a", outputs="b", more=more) + stage("three", "listed", inputs="b"))
    assert made.end() == 1
    assert report(tmp_path)["stages"]["two"]["restarts"] == 2
    assert "restart 2 of 2" in made.err


# -- interrupts


def test_an_interrupt_finishes_what_was_begun(run, tmp_path):
    made = run(
        ENDLESS
        + stage("two", "double", inputs="a", outputs="b")
        + stage("three", "listed", inputs="b", more="params = { times = 2 }")
    )
    made.saw(r"three \| first")
    made.signal(signal.SIGINT)
    assert made.end() == 130, made.err
    items = [each["items"] for each in report(tmp_path)["stages"].values()]
    assert items[0] > 0
    assert items == [items[0]] * 3
    assert f"one   | made {items[0]}" in made.err
    assert f"three | seen {items[0]} in order" in made.err
    assert "test: interrupted" in made.out


def test_sigterm_drains_too(run, tmp_path):
    made = run(ENDLESS + stage("two", "listed", inputs="a") + stage("s", "numbers", outputs="b"))
    made.saw(r"two \| first")
    made.signal(signal.SIGTERM)
    assert made.end() == 143, made.err
    assert report(tmp_path)["status"] == "interrupted"


def test_a_second_interrupt_forces(run, tmp_path):
    made = run(channel("a") + stage("one", "pause", outputs="a") + stage("two", "listed", inputs="a"))
    made.saw("pausing")
    made.signal(signal.SIGINT)
    made.saw("once more")
    made.signal(signal.SIGINT)
    assert made.end() == 130
    assert report(tmp_path)["stages"]["one"]["state"] == "stopped"


def test_the_workers_leave_when_the_supervisor_is_killed(run, runtime):
    made = run(ENDLESS + stage("two", "listed", inputs="a") + stage("s", "pause", outputs="b"))
    made.saw(r"two \| first")
    made.saw("pausing")
    assert len(processes_of(runtime)) >= 4
    made.process.kill()
    made.process.wait()
    wait_until(lambda: processes_of(runtime) == [], "the end of the workers and their broker", PATIENCE)
