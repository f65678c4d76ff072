"""Traces: what a process records, how parts are merged, and what a summary makes of them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ipcsync import trace
from ipcsync.errors import InvalidArgument
from ipcsync.trace_summary import load, sentence, summarise

PHASES = {"X": {"dur"}, "M": {"args"}, "s": {"id"}, "f": {"id"}, "b": {"id"}, "e": {"id"}}


def check_format(path: Path) -> list[dict[str, Any]]:
    """The trace-event format, as far as it is used: what each phase needs, and that no two spans of a track overlap
    unless one is within the other."""
    events = load(path)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in PHASES
        assert PHASES[event["ph"]] <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], float | int)
        assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_ends: list[float] = []
        for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.01
            open_ends.append(end)
    begun = {(e["name"], e["id"]) for e in events if e["ph"] == "b"}
    assert begun == {(e["name"], e["id"]) for e in events if e["ph"] == "e"}
    return events


@pytest.fixture
def parts(tmp_path: Path) -> Any:
    folder = tmp_path / "parts"
    folder.mkdir()
    yield folder
    trace.stop()


def test_without_a_recorder_nothing_is_made() -> None:
    assert trace.ACTIVE is None
    assert trace.span("call", "a") is trace.span("call", "b")


def test_spans_of_every_thread_are_merged_into_one_trace(parts: Path, tmp_path: Path) -> None:
    recorder = trace.start(parts, "read")

    def work() -> None:
        with trace.span("stage", "read"), trace.span("slot", "frames", item=1):
            recorder.published("frames", 1, time.monotonic_ns())

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
    with trace.span("slot", "frames", item=1):
        recorder.taken(parts, "frames", 1, time.monotonic_ns() - 1000)
    trace.stop()
    assert trace.ACTIVE is None
    count = trace.merge(parts.iterdir(), tmp_path / "out.json", pipeline="photos")
    events = check_format(tmp_path / "out.json")
    assert len(events) == count
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} >= {"read", "worker"}
    assert json.loads((tmp_path / "out.json").read_text())["otherData"] == {"pipeline": "photos"}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_slots_that_overlap_are_no_tree_and_are_drawn_apart(parts: Path, tmp_path: Path) -> None:
    recorder = trace.start(parts, "read")
    first, second, third = object(), object(), object()
    recorder.opened(first)
    recorder.opened(second)
    recorder.released(first, "frames", "in", 1)
    recorder.opened(third)
    recorder.released(third, "edges", "out", 2)
    recorder.released(second, "frames", "in", 2)
    recorder.released(first, "frames", "in", 1)  # again: nothing
    trace.stop()
    trace.merge(parts.iterdir(), tmp_path / "out.json")
    events = [e for e in check_format(tmp_path / "out.json") if e.get("cat") == "slot"]
    assert [(e["ph"], e["name"], e.get("args", {}).get("item")) for e in events] == [
        ("b", "frames", 1),
        ("e", "frames", None),
        ("X", "edges", 2),
        ("X", "frames", 2),
    ]


def test_what_a_killed_process_did_not_finish_is_left_out(parts: Path, tmp_path: Path) -> None:
    recorder = trace.start(parts, "read")
    with trace.span("call", "a"):
        pass
    recorder.flush()
    with recorder.path.open("ab") as part:
        part.write(b'{"name":"b","ph":"X","args":{}')
    trace.stop()
    trace.merge(parts.iterdir(), tmp_path / "out.json")
    assert [e["name"] for e in check_format(tmp_path / "out.json") if e["ph"] == "X"] == ["a"]


def test_what_is_recorded_reaches_the_part_before_the_end(parts: Path) -> None:
    recorder = trace.start(parts, "read")
    for i in range(2000):
        recorder.span("call", str(i), i, i + 1)
    assert recorder.path.read_bytes().count(b"\n") > 1000


def run(name: str, pid: int, wall: float, *waits: tuple[str, float]) -> list[dict[str, Any]]:
    base = {"pid": pid, "tid": pid, "ts": 1.0}
    spans = [{"ph": "X", "cat": "wait", "name": k, "dur": s * 1e6, "args": {"for": k}, **base} for k, s in waits]
    return [{"ph": "X", "cat": "stage", "name": name, "dur": wall * 1e6, **base}, *spans]


def test_the_summary_names_the_stage_that_the_others_wait_for() -> None:
    events = [
        *run("read", 1, 10.0, ("space", 8.0)),
        *run("edges", 2, 10.0, ("input", 1.0), ("space", 0.5)),
        *run("edges", 3, 10.0, ("input", 0.5)),
        *run("save", 4, 10.0, ("input", 7.0), ("completion", 2.0)),
        {"ph": "b", "cat": "hop", "name": "frames", "id": "1", "ts": 0.0, "pid": 1, "tid": 1},
        {"ph": "e", "cat": "hop", "name": "frames", "id": "1", "ts": 250.0, "pid": 1, "tid": 1},
    ]
    summary = summarise(events)
    by_name = {s.name: s for s in summary.stages}
    assert by_name["edges"].processes == 2
    assert (by_name["edges"].input, by_name["edges"].space, by_name["edges"].busy) == (1.5, 0.5, 18.0)
    assert by_name["save"].busy == pytest.approx(1.0)
    assert summary.hops == {"frames": [0.00025]}
    assert sentence(summary) == "bottleneck: edges (busy for 9.00 s each, 90% of its time)"
    assert json.loads(json.dumps(summary.as_json()))["bottleneck"] == "edges"
    assert sentence(summarise([])) == "no stage is in this trace"


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"traceEvents": [{}]}', "not json"])
def test_a_file_that_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"x\.json is no trace"):
        load(tmp_path / "x.json")
