"""Traces of real processes: of a pipeline by ``ipcsync run --trace``, and of one's own by ``session.trace``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, trace
from ipcsync.host_waits import announced
from ipcsync.trace_summary import load, summarise

from ..harness import Child, Gate, Peer, wait_until
from ..unit.test_trace import check_format

PHOTOS = Path(__file__).parents[2] / "docs/examples/photos/pipeline.toml"


def command(*arguments: str) -> str:
    call = [sys.executable, "-c", "from ipcsync.cli import main; main()", *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=50, env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_planted_slow_stage_of_the_photo_pipeline_is_named(runtime: Path, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    out = tmp_path / "out.json"
    folders = [f"stages.{stage}.params.folder={tmp_path}" for stage in ("write", "histogram")]
    sets = [part for each in (*folders, "stages.edges.params.slow=1.5") for part in ("--set", each)]
    command("run", str(PHOTOS), "--trace", str(out), *sets)
    events = check_format(out)
    assert {e["cat"] for e in events if "cat" in e} == {"stage", "call", "slot", "wait", "hop"}
    told = command("trace", "summary", str(out))
    assert "bottleneck: edges (busy for" in told
    summary = json.loads(command("trace", "summary", "--json", str(out)))
    assert [s["name"] for s in summary["stages"]][:2] == ["read", "edges"]
    assert summary["bottleneck"] == "edges"
    assert summary["hops"]["frames"]["count"] == 5
    assert summary["hops"]["edges"]["count"] == 10  # two readers
    by_name = {s["name"]: s for s in summary["stages"]}
    assert by_name["write"]["input"] > 1.0  # five items, a third of a second each
    if pytest.importorskip("matplotlib"):
        picture = tmp_path / "out.png"
        command("trace", "plot", str(out), str(picture))
        assert picture.read_bytes()[:4] == b"\x89PNG"


def reads(peer: Peer, parts: Path) -> None:
    trace.start(parts, "reader")
    with ipcsync.connect(name="reader") as session, session.open_channel("frames").reader() as reader:
        peer.send("attached")
        for _ in range(3):
            with reader.get():
                pass
    trace.stop()


def test_an_items_slots_are_joined_by_an_arrow_between_processes(
    session: Session, spawn: Callable[..., Child], tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    channel = session.create_channel("frames", shape=(4,), dtype="uint8", depth=2, device="cpu")
    with channel.writer() as writer:
        child = spawn(reads, parts)
        assert child.recv() == "attached"
        trace.start(parts, "writer")
        for _ in range(3):
            with writer.slot() as slot:
                slot.array[...] = 1
        child.join()
    trace.stop()
    trace.merge(sorted(parts.iterdir()), tmp_path / "out.json")
    events = check_format(tmp_path / "out.json")
    begun = {e["id"]: e for e in events if e["ph"] == "s"}
    ended = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begun.keys() == ended.keys() == {"frames#1", "frames#2", "frames#3"}
    for id, start in begun.items():
        assert (start["pid"], ended[id]["pid"]) == (os.getpid(), child.pid)
        assert start["ts"] <= ended[id]["ts"] + 1
        assert slot_around(events, start)["args"] == {"side": "out", "item": int(id[-1])}
        assert slot_around(events, ended[id])["args"] == {"side": "in", "item": int(id[-1])}


def slot_around(events: list[dict[str, Any]], point: dict[str, Any]) -> dict[str, Any]:
    """The slot that an end of an arrow is bound to: the one span of its thread that it lies in."""
    (found,) = (
        e
        for e in events
        if e["ph"] == "X" and e["cat"] == "slot" and (e["pid"], e["tid"]) == (point["pid"], point["tid"])
        and e["ts"] <= point["ts"] <= e["ts"] + e["dur"]
    )  # fmt: skip
    return found


def test_session_trace_writes_waits_and_device_spans(session: Session, tmp_path: Path) -> None:
    event = session.create_event("frame", device="cpu")
    stream, gate = ipcsync.Stream("cpu"), Gate()

    def open_once_waited_for() -> None:
        wait_until(lambda: list(announced(session.ledger, session.block)), "a wait")
        gate.open()

    with session.trace(tmp_path / "out.json"):
        recorder = trace.ACTIVE
        assert recorder is not None
        with recorder.gpu("work", stream):
            stream.enqueue(gate.hold)
        event.record(stream)
        opener = threading.Thread(target=open_once_waited_for)
        opener.start()
        event.synchronize(round=1)
        opener.join()
    assert trace.ACTIVE is None
    events = check_format(tmp_path / "out.json")
    (wait,) = (e for e in events if e.get("cat") == "wait")
    assert wait["args"] == {"for": "completion", "round": 1}
    assert wait["dur"] > 1000
    (work,) = (e for e in events if e.get("cat") == "gpu")
    assert work["dur"] > 1000
    assert summarise(load(tmp_path / "out.json")).stages == []
