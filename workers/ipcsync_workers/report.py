"""What a run came to: one record for the closing table and for ``--json``."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from rich.table import Table

from .counters import percentile
from .graph import upstream
from .supervisor import StageRun, Supervisor


def report(run: Supervisor) -> dict[str, Any]:
    """The run as plain data: times in seconds, rates in items a second, bytes as such."""
    groups: dict[str, list[StageRun]] = {}
    for worker in run.stages.values():
        groups.setdefault(worker.worker.stage, []).append(worker)
    stages = {name: _stage(workers, groups, run) for name, workers in groups.items()}
    failed = [name for name, stage in stages.items() if stage["state"] == "failed"]
    return {
        "pipeline": run.pipeline.settings.name,
        "status": "failed" if failed else "interrupted" if run.interrupted else _status(run),
        "failed": failed,
        "seconds": round((run.ended or time.monotonic()) - run.began, 6) if run.began else 0.0,
        "broker_restarts": run.broker_restarts,
        "stages": stages,
    }


def _status(run: Supervisor) -> str:
    return "done" if all(stage.state == "done" for stage in run.stages.values()) else "failed"


def _stage(workers: list[StageRun], groups: dict[str, list[StageRun]], run: Supervisor) -> dict[str, Any]:
    """A stage, all its replicas together."""
    inputs = [(name, port) for worker in workers for name, port in worker.counters.inputs.items()]
    outputs = [(name, port) for worker in workers for name, port in worker.counters.outputs.items()]
    counted = [port for _, port in inputs or outputs]
    items = sum(port.items for port in counted)
    ended = time.monotonic() if not all(worker.ended for worker in workers) else max(w.ended for w in workers)
    hops = [port.buckets for _, port in inputs]
    written: Counter[str] = Counter()
    for each in (worker for group in groups.values() for worker in group):
        written.update({name: port.items for name, port in each.counters.outputs.items()})
    finished: Counter[str] = Counter()
    for name, port in inputs:
        finished[name] += port.items + port.dropped
    restarts = sum(worker.restarts for worker in workers)
    states = [worker.state for worker in workers]
    state = next((bad for bad in ("failed", "stopped", "restarting", "starting", "running") if bad in states), "done")
    made = {
        "state": state,
        "items": items,
        "rate": round(items / max(ended - run.began, 1e-9), 3),
        "bytes": sum(port.bytes for port in counted),
        "latency_p50": percentile(hops, 0.50) if hops else None,
        "latency_p99": percentile(hops, 0.99) if hops else None,
        # Written but not finished here: passed over by policy "latest", left by a stage that returned, or by a failure.
        "missed": sum(max(0, written[name] - n) for name, n in finished.items()),
        # Taken and not finished, then taken again: what a stage that was started again began twice.
        "repeated": sum(map(sum, hops)) - items if restarts and state == "done" else 0,
        # Came twice, because a replica was killed when it had written it and not yet said so. Once was enough.
        "dropped": sum(port.dropped for _, port in inputs),
        "written": {name: written[name] for name, _ in outputs},
        "restarts": restarts,
        "counts": dict(sum((Counter(worker.counts) for worker in workers), Counter())),
        "error": next((worker.error for worker in workers if worker.error), None),
    }
    if len(workers) > 1:
        made["replicas"] = {
            worker.name: {
                "state": worker.state,
                "items": sum(port.items for port in (worker.counters.inputs or worker.counters.outputs).values()),
                "restarts": worker.restarts,
            }
            for worker in workers
        }
    return made


def table(record: dict[str, Any]) -> Table:
    """The closing table."""
    missing = any(stage["missed"] or stage["repeated"] for stage in record["stages"].values())
    counts = any(stage["counts"] for stage in record["stages"].values())
    title = f"{record['pipeline']}: {record['status']} in {record['seconds']:.2f} s"
    if record["broker_restarts"]:
        title += f", the broker restarted {record['broker_restarts']} ×"
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
        made.add_row(*cells, _shown(stage["state"]))
        for replica, told in stage.get("replicas", {}).items():
            share: list[str] = [f"  {replica}", f"{told['items']:,}", "", "", "", "", f"{told['restarts']}"]
            made.add_row(*share, *[""] * (len(cells) - len(share)), _shown(told["state"]), style="dim")
    return made


def _shown(state: str) -> str:
    return f"[bold red]{state}[/]" if state == "failed" else state


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
    """How many items the worker will have seen in the end, as far as anybody can tell: the sources may have said so.
    None for a replica: who gets how many shows at the end."""
    run = stages[name]
    if run.counters.expected:
        return run.counters.expected
    if run.plan.replicas > 1:
        return None
    return _total(run.worker.stage, stages)


def _total(stage: str, stages: dict[str, StageRun]) -> int | None:
    workers = [run for run in stages.values() if run.worker.stage == stage]
    if workers[0].counters.expected:
        return workers[0].counters.expected
    totals = []
    for up in upstream({run.worker.stage: run.plan for run in stages.values()})[stage]:
        before = [run for run in stages.values() if run.worker.stage == up]
        written = sum(port.items for run in before for port in run.counters.outputs.values())
        totals.append(written if all(run.over for run in before) else _total(up, stages))
    known = [total for total in totals if total]
    return max(known) if known else None
