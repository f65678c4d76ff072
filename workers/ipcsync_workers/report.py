"""What a run came to: one record for the closing table and for ``--json``."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table

from .counters import percentile
from .graph import upstream
from .supervisor import StageRun, Supervisor


def report(run: Supervisor) -> dict[str, Any]:
    """The run as plain data: times in seconds, rates in items a second, bytes as such."""
    stages = {name: _stage(stage, run) for name, stage in run.stages.items()}
    failed = [name for name, stage in run.stages.items() if stage.state == "failed"]
    return {
        "pipeline": run.pipeline.settings.name,
        "status": "failed" if failed else "interrupted" if run.interrupted else _status(run),
        "failed": failed,
        "seconds": round((run.ended or time.monotonic()) - run.began, 6) if run.began else 0.0,
        "stages": stages,
    }


def _status(run: Supervisor) -> str:
    return "done" if all(stage.state == "done" for stage in run.stages.values()) else "failed"


def _stage(stage: StageRun, run: Supervisor) -> dict[str, Any]:
    inputs, outputs = stage.counters.inputs, stage.counters.outputs
    counted = list((inputs or outputs).values())
    items = sum(port.items for port in counted)
    seconds = max((stage.ended or time.monotonic()) - run.began, 1e-9)
    hops = [port.buckets for port in inputs.values()]
    written = {name: port for each in run.stages.values() for name, port in each.counters.outputs.items()}
    return {
        "state": stage.state,
        "items": items,
        "rate": round(items / seconds, 3),
        "bytes": sum(port.bytes for port in counted),
        "latency_p50": percentile(hops, 0.50) if hops else None,
        "latency_p99": percentile(hops, 0.99) if hops else None,
        # Written but not finished here: passed over by policy "latest", left by a stage that returned, or by a failure.
        "missed": sum(max(0, written[name].items - port.items) for name, port in inputs.items()),
        # Taken and not finished, then taken again: what a stage that was started again began twice.
        "repeated": sum(map(sum, hops)) - items if stage.restarts and stage.state == "done" else 0,
        "written": {name: port.items for name, port in outputs.items()},
        "restarts": stage.restarts,
        "counts": dict(stage.counts),
        "error": stage.error or None,
    }


def table(record: dict[str, Any]) -> Table:
    """The closing table."""
    missing = any(stage["missed"] or stage["repeated"] for stage in record["stages"].values())
    counts = any(stage["counts"] for stage in record["stages"].values())
    title = f"{record['pipeline']}: {record['status']} in {record['seconds']:.2f} s"
    made = Table(title=title, title_justify="left", title_style="bold")
    made.add_column("stage")
    for heading in ("items", "items/s", "hop p50", "hop p99", "bytes", "restarts"):
        made.add_column(heading, justify="right")
    if missing:
        made.add_column("missed", justify="right")
        made.add_column("repeated", justify="right")
    if counts:
        made.add_column("counted")
    made.add_column("")
    for name, stage in record["stages"].items():
        cells = [
            name,
            f"{stage['items']:,}",
            f"{stage['rate']:,.1f}",
            duration(stage["latency_p50"]),
            duration(stage["latency_p99"]),
            size(stage["bytes"]),
            str(stage["restarts"]),
        ]
        if missing:
            cells += [f"{stage['missed']:,}", f"{stage['repeated']:,}"]
        if counts:
            cells.append(", ".join(f"{n:,} {what}" for what, n in stage["counts"].items()))
        state = stage["state"]
        made.add_row(*cells, f"[bold red]{state}[/]" if state == "failed" else state)
    return made


def duration(seconds: float | None) -> str:
    """A latency for people: three figures and a unit."""
    if seconds is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def size(nbytes: int) -> str:
    """An amount of bytes for people."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def total_of(name: str, stages: dict[str, StageRun]) -> int | None:
    """How many items the stage will have seen in the end, as far as anybody can tell: the sources may have said so."""
    stage = stages[name]
    if stage.counters.expected:
        return stage.counters.expected
    before = upstream({each: run.plan for each, run in stages.items()})[name]
    totals = [
        sum(port.items for port in stages[up].counters.outputs.values()) if stages[up].over else total_of(up, stages)
        for up in before
    ]
    known = [total for total in totals if total]
    return max(known) if known else None
