"""Where a trace's time went: per stage busy, waiting for input, waiting for space; and the bottleneck. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import InvalidArgument

_WAITS = {"input": "input", "completion": "input", "space": "space", "budget": "space"}


@dataclass
class StageTime:
    """Seconds of one stage, over all its replicas. ``busy`` is what is left of ``wall`` when no wait was under way."""

    name: str
    processes: int = 0
    wall: float = 0.0
    input: float = 0.0
    space: float = 0.0
    gpu: float = 0.0
    items: int = 0

    @property
    def busy(self) -> float:
        return max(0.0, self.wall - self.input - self.space)

    @property
    def share(self) -> float:
        """How much of its time the stage was busy, 0 to 1."""
        return self.busy / self.wall if self.wall else 0.0


@dataclass
class Summary:
    stages: list[StageTime] = field(default_factory=list)
    hops: dict[str, list[float]] = field(default_factory=dict)  # channel: latencies in seconds, sorted

    @property
    def bottleneck(self) -> StageTime | None:
        """The stage that was busy longest, each of its replicas: no run could have been shorter than that."""
        return max(self.stages, key=lambda s: s.busy / s.processes, default=None)

    def as_json(self) -> dict[str, Any]:
        stages = [{**asdict(s), "busy": s.busy, "share": s.share} for s in self.stages]
        hops = {name: {"count": len(v), "p50": _at(v, 0.5), "p99": _at(v, 0.99)} for name, v in self.hops.items()}
        return {"stages": stages, "hops": hops, "bottleneck": self.bottleneck and self.bottleneck.name}


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file; ``InvalidArgument`` if it is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgument(f"{path} is no trace (not JSON: {error})") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(e, dict) and "ph" in e for e in events):
        raise InvalidArgument(f"{path} is no trace: it has no list of events with a phase")
    return events


def begins(events: Sequence[Mapping[str, Any]], pid: int) -> float:
    """When a process first had an item (microseconds): stages in this order are in the order of the flow."""
    own = [e for e in events if e["pid"] == pid and e["ph"] == "X"]
    return min((e["ts"] for e in own if e.get("cat") == "slot"), default=max((e["ts"] for e in own), default=0.0))


def summarise(events: Iterable[Mapping[str, Any]]) -> Summary:
    """Only the thread that runs a stage counts: its ``stage`` span, and the waits and calls within."""
    spans = list(events)
    runs: dict[tuple[int, int], Mapping[str, Any]] = {}
    waits: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    calls: dict[tuple[int, int], int] = defaultdict(int)
    gpu: dict[int, float] = defaultdict(float)
    began: dict[tuple[str, Any], float] = {}
    hops: dict[str, list[float]] = defaultdict(list)
    for event in spans:
        phase, category = event["ph"], event.get("cat")
        if category == "hop" and phase in "be":
            key = (event["name"], event["id"])
            if phase == "b":
                began[key] = event["ts"]
            elif key in began:
                hops[event["name"]].append((event["ts"] - began.pop(key)) / 1e6)
            continue
        if phase != "X":
            continue
        thread = (event["pid"], event["tid"])
        if category == "stage":
            runs[thread] = event
        elif category == "wait":
            waits[thread].append(event)
        elif category == "slot":
            calls[thread] += 1
        elif category == "gpu":
            gpu[event["pid"]] += event["dur"] / 1e6
    stages: dict[str, StageTime] = {}
    for thread, run in runs.items():
        stage = stages.setdefault(run["name"], StageTime(run["name"]))
        stage.processes += 1
        stage.wall += run["dur"] / 1e6
        stage.gpu += gpu[thread[0]]
        stage.items += calls[thread]
        for wait in waits[thread]:
            kind = _WAITS.get(wait.get("args", {}).get("for"), "input")
            setattr(stage, kind, getattr(stage, kind) + wait["dur"] / 1e6)
    order = {run["name"]: begins(spans, pid) for (pid, _), run in runs.items()}
    return Summary(
        sorted(stages.values(), key=lambda s: order[s.name]),
        {name: sorted(values) for name, values in sorted(hops.items())},
    )


def _at(values: list[float], share: float) -> float | None:
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def sentence(summary: Summary) -> str:
    """What to do about it, in one line."""
    slow = summary.bottleneck
    if slow is None:
        return "no stage is in this trace"
    each = " each" if slow.processes > 1 else ""
    return f"bottleneck: {slow.name} (busy for {slow.busy / slow.processes:.2f} s{each}, {slow.share:.0%} of its time)"
