"""``ipcsync why`` of a stage that waits for replicas: every one of them is followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import Session

from ..harness import Child, Peer, wait_until
from .pipelines import PATIENCE, Run, channel, stage, starts

pytestmark = pytest.mark.watchdog(300)
STAGES = """
import os, time

def numbers(stage):
    for n in range(12):
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n

def stuck(stage):
    for slot in stage.input.slots():
        while not os.path.exists(stage.params["go"]):
            time.sleep(0.01)
        with stage.output.slot(meta=slot.meta) as out:
            out.array[...] = slot.array

def listed(stage):
    print("seen", [slot.meta["n"] for slot in stage.input.slots()] == list(range(12)), flush=True)
"""


@pytest.fixture
def run(runtime: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starts(tmp_path, STAGES)


def why(name: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from ipcsync.cli import main; main()", "why", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=60)
    return json.loads(done.stdout) if done.returncode in (0, 4) else {"links": [], "ends": [], "deadlocks": []}


def test_a_stage_that_waits_for_replicas_waits_for_all_of_them(run: Callable[..., Run], tmp_path: Path) -> None:
    go = tmp_path / "go"
    more = f'replicas = 6\nparams = {{ go = "{go}" }}'
    made = run(
        channel("a")
        + channel("b")
        + stage("one", "numbers", outputs="a")
        + stage("two", "stuck", inputs="a", outputs="b", more=more)
        + stage("three", "listed", inputs="b")
    )

    def waited() -> bool:
        found = why("three")
        links = [link for link in found["links"] if link["waiter"].startswith("'three'")]
        assert not found["deadlocks"]
        return len(links) == 6 and len({block for link in links for block in link["blockers"]}) == 6

    wait_until(waited, "the wait for six replicas", PATIENCE)
    go.touch()
    assert made.end() == 0, made.err
    assert "three | seen True" in made.err.replace("three  |", "three |")


def selects(peer: Peer) -> None:
    with ipcsync.connect(name="reader") as session:
        readers = [session.open_channel(f"c{i}").reader() for i in range(3)]
        peer.send("attached")
        assert session.select(readers, timeout=None) == readers[1:2]
        for reader in readers:
            reader.close()
        peer.send("selected")
        peer.recv()


def test_a_wait_that_ended_is_told_no_more(session: Session, spawn: Callable[..., Child]) -> None:
    channels = [session.create_channel(f"c{i}", shape=(4,), dtype="uint8", device="cpu") for i in range(3)]
    writers = [channel.writer() for channel in channels]
    reader = spawn(selects)
    assert reader.recv() == "attached"
    wait_until(lambda: len(why("reader")["links"]) == 3, "the wait for three channels")
    with writers[1].slot() as slot:
        slot.array[...] = 1
    assert reader.recv() == "selected"
    assert why("reader")["links"] == []
    reader.send()
    reader.join()
    for writer in writers:
        writer.close()
