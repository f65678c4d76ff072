"""The broker that ``ipcsync run`` has started dies in the middle of the run: another one takes its place, and no item
is lost or comes twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipcsync import endpoints, linux, runtime
from ipcsync_workers import keeper

from ..harness import TIMEOUT, Broker, files_of, processes_of, wait_until
from .pipelines import HEAD, PATIENCE, Run, channel, report, stage, starts

pytestmark = pytest.mark.watchdog(300)
STAGES = """
import os, time
print("loaded", flush=True)

def numbers(stage):
    n = 0
    while not (n >= 50 and os.path.exists(stage.params["go"])):
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n
        n += 1
        time.sleep(0.001)
    print("made", n, flush=True)

def relay(stage):
    for slot in stage.input.slots():
        with stage.output.slot(meta=slot.meta) as out:
            out.array[...] = slot.array

def listed(stage):
    seen = 0
    for slot in stage.input.slots():
        assert slot.meta["n"] == seen and (slot.array == seen).all(), (slot.meta, seen)
        seen += 1
        if seen == 20:
            print("under way", flush=True)
    print("seen", seen, flush=True)
"""


@pytest.fixture
def run(runtime: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starts(tmp_path, STAGES)


def line(tmp_path: Path, more: str = "") -> str:
    return (
        channel("a")
        + channel("b")
        + stage("one", "numbers", outputs="a", more=f'params = {{ go = "{tmp_path / "go"}" }}')
        + stage("two", "relay", inputs="a", outputs="b", more=more)
        + stage("three", "listed", inputs="b")
    )


def kill(directory: Path, before: int = 0) -> int:
    """Kills the broker, another one than the one with this pid, once there is one; its pid."""

    def another() -> int:
        pid = runtime.broker_pid(directory)
        return pid if pid and pid != before else 0

    pid: int = wait_until(another, "a broker", PATIENCE)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.parametrize("more", ["", "replicas = 2"], ids=["one", "replicas"])
def test_a_killed_broker_is_started_again_and_no_item_is_lost(
    run: Callable[..., Run], tmp_path: Path, runtime: Path, more: str
) -> None:
    made = run(line(tmp_path, more))
    made.saw(r"three.* \| under way")
    pid = 0
    for turn in (1, 2, 3):
        pid = kill(runtime, pid)
        made.saw(rf"the broker died \(pid {pid}\); start {turn} of {keeper.LIMIT}")
        wait_until(lambda turn=turn: made.err.count("the broker runs again") == turn, "the next broker", PATIENCE)
    (tmp_path / "go").touch()
    assert made.end() == 0, made.err
    count = int(made.saw(r"one.* \| made (\d+)")[1])
    assert int(made.saw(r"three.* \| seen (\d+)")[1]) == count
    found = report(tmp_path)
    assert found["status"] == "done"
    assert found["broker_restarts"] == 3
    assert [each["items"] for each in found["stages"].values()] == [count] * 3
    assert [each["restarts"] for each in found["stages"].values()] == [0] * 3
    assert "the broker restarted 3 ×" in made.out
    assert files_of(runtime, ()) == []
    assert processes_of(runtime) == []


def test_one_that_dies_as_it_starts_is_started_again_too(
    run: Callable[..., Run], tmp_path: Path, runtime: Path
) -> None:
    made = run(line(tmp_path))
    made.saw(r"three.* \| under way")
    pid = 0
    for _ in range(3):
        pid = kill(runtime, pid)  # as soon as it has its lock, before it serves
    (tmp_path / "go").touch()
    assert made.end() == 0, made.err
    assert int(made.saw(r"one.* \| made (\d+)")[1]) == int(made.saw(r"three.* \| seen (\d+)")[1])


def test_a_broker_that_dies_while_the_stages_start(run: Callable[..., Run], tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "go").touch()
    made = run(line(tmp_path))
    made.saw(r"\| loaded")
    kill(runtime)
    assert made.end() == 0, made.err
    assert "seen 50" in made.err
    assert report(tmp_path)["broker_restarts"] == 1


def test_a_broker_that_dies_while_the_stages_end(run: Callable[..., Run], tmp_path: Path, runtime: Path) -> None:
    made = run(line(tmp_path))
    made.saw(r"three.* \| under way")
    (tmp_path / "go").touch()
    made.saw(r"one.* \| made")
    kill(runtime)
    assert made.end() == 0, made.err
    assert int(made.saw(r"one.* \| made (\d+)")[1]) == int(made.saw(r"three.* \| seen (\d+)")[1])


AT_THE_END = """
import os, signal, sys
from ipcsync import runtime
from ipcsync_workers import cli, keeper

close = keeper.Keeper.close

def close_and_kill(kept):
    close(kept)
    os.kill(runtime.broker_pid(kept.directory), signal.SIGKILL)

keeper.Keeper.close = close_and_kill
sys.exit(cli.run_file(cli.Path(sys.argv[1])))
"""


def test_a_broker_that_dies_when_the_run_is_over_leaves_nothing(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "stages.py").write_text(STAGES)
    (tmp_path / "pipeline.toml").write_text(HEAD + line(tmp_path))
    command = [sys.executable, "-c", AT_THE_END, str(tmp_path / "pipeline.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert files_of(runtime, ()) == []
    assert processes_of(runtime) == []


def test_somebody_elses_broker_is_theirs(run: Callable[..., Run], tmp_path: Path, broker: Broker) -> None:
    made = run(line(tmp_path))
    made.saw(r"three.* \| under way")
    broker.kill()
    (tmp_path / "go").touch()
    made.end()
    assert "start 1 of" not in made.err
    assert runtime.broker_pid(broker.runtime) is None
    broker.start()  # takes over what the run has left, and lets it go


# -- the keeper


def test_one_that_died_before_anybody_looked_is_started_again(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setattr(endpoints, "start_broker_in", started.append)
    broker.kill()
    kept = keeper.Keeper(broker.runtime, lambda text: None)
    wait_until(lambda: started, "the start")
    kept.close()
    broker.start()


def test_a_broker_whose_threads_are_still_dying_is_nobody_elses(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process is a zombie while its threads still hold its lock."""
    started: list[Path] = []
    monkeypatch.setattr(keeper, "DELAY", 0.001)
    monkeypatch.setattr(endpoints, "start_broker_in", started.append)
    monkeypatch.setattr(linux, "process_state", lambda pid: ("Z", 0))
    looked: list[int] = []

    def look(directory: Path) -> int | None:
        looked.append(broker.pid)
        return broker.pid if len(looked) < 20 else None

    monkeypatch.setattr(runtime, "broker_pid", look)
    kept = keeper.Keeper(broker.runtime, lambda text: None)
    wait_until(lambda: started, "the start")
    kept.close()


def test_it_gives_up_after_a_few_times_in_a_row(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "DELAY", 0.001)
    monkeypatch.setattr(endpoints, "start_broker_in", lambda directory: None)  # dies at once, each time
    said: list[str] = []
    kept = keeper.Keeper(broker.runtime, said.append)
    broker.kill()
    kept._thread.join(TIMEOUT)
    assert not kept._thread.is_alive()
    assert len([text for text in said if "; start" in text]) == keeper.LIMIT
    assert said[-1] == f"the broker died {keeper.LIMIT} times in a row: it is not started again"
    kept.close()
    broker.start()


def test_one_that_somebody_else_started_meanwhile_is_left_to_them(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "DELAY", 1000.0)
    said: list[str] = []
    kept = keeper.Keeper(broker.runtime, said.append)
    broker.kill()
    wait_until(lambda: said, "its notice")
    broker.start()
    kept.close()
    assert kept.restarts == 0
    assert len(said) == 1


def test_the_end_of_the_run_is_not_a_death(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setattr(endpoints, "start_broker_in", started.append)
    kept = keeper.Keeper(broker.runtime, lambda text: None)
    kept.close()
    broker.kill()
    assert not kept._thread.is_alive()
    assert not started
    broker.start()
