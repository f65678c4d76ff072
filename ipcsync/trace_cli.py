"""``ipcsync trace summary`` and ``ipcsync trace plot``: reading a trace without Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .trace_summary import Summary, begins, load, sentence, summarise

_COLOURS = {"call": "#4c78a8", "slot": "#a8c5e2", "gpu": "#54a24b", "input": "#e8e8e8", "space": "#f58518"}


@click.group()
def trace() -> None:
    """Reads traces (`ipcsync run --trace`, `session.trace`); Perfetto opens them as well."""


@trace.command()
@click.argument("path", metavar="OUT.JSON", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def summary(path: Path, as_json: bool) -> None:
    """Says where the time went: per stage busy, waiting for input, waiting for space; and names the bottleneck."""
    found = summarise(load(path))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    console = Console()
    console.print(_table(found))
    if found.hops:
        console.print()
        console.print(_hops(found))
    console.print(f"\n{sentence(found)}")


def _table(found: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for title in ("replicas", "seconds", "busy", "waiting for input", "waiting for space", "gpu"):
        table.add_column(title, justify="right")
    for stage in found.stages:
        wall = stage.wall or 1.0
        shares = [f"{part / wall:.0%}" for part in (stage.busy, stage.input, stage.space)]
        gpu = f"{stage.gpu / wall:.0%}" if stage.gpu else "-"
        table.add_row(stage.name, str(stage.processes), f"{stage.wall:.2f}", *shares, gpu)
    return table


def _hops(found: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("channel")
    for title in ("hops", "p50", "p99"):
        table.add_column(title, justify="right")
    for name, told in found.as_json()["hops"].items():
        table.add_row(name, str(told["count"]), _span(told["p50"]), _span(told["p99"]))
    return table


def _span(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


@trace.command()
@click.argument("path", metavar="OUT.JSON", type=click.Path(path_type=Path))
@click.argument("picture", metavar="OUT.PNG", type=click.Path(path_type=Path))
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Only this long, from --start on.")
@click.option("--start", default=0.0, type=click.FloatRange(min=0), help="Seconds into the trace.")
def plot(path: Path, picture: Path, seconds: float | None, start: float) -> None:
    """Draws the timeline of every stage's process (needs matplotlib: pip install 'ipcsync[plots]')."""
    try:
        draw(load(path), picture, start, seconds)
    except ImportError:
        raise click.ClickException("this needs matplotlib: pip install 'ipcsync[plots]'") from None
    click.echo(f"wrote {picture}")


def draw(events: Sequence[dict[str, Any]], picture: Path, start: float = 0.0, seconds: float | None = None) -> None:
    """One row a process, in the order of the flow; what waits is drawn over what is busy."""
    from matplotlib.figure import Figure

    spans = [e for e in events if e["ph"] == "X"]
    if not spans:
        raise click.ClickException("there are no spans in this trace")
    zero = min(e["ts"] for e in spans) + start * 1e6
    until = float("inf") if seconds is None else seconds
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    rows = sorted({e["pid"] for e in spans}, key=lambda pid: begins(spans, pid))
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for kind in ("slot", "call", "gpu", "input", "space"):
        for row, pid in enumerate(rows):
            bars = [
                (begin, length)
                for e in spans
                if e["pid"] == pid and _kind(e) == kind
                for begin, length in [((e["ts"] - zero) / 1e6, e["dur"] / 1e6)]
                if begin + length > 0 and begin < until
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[kind])
        label = {"input": "waits for input", "space": "waits for space"}.get(kind, kind)
        axes.broken_barh([], (0, 0), facecolors=_COLOURS[kind], label=label)
    axes.set_yticks(range(len(rows)), [f"{names.get(pid, '')} ({pid})" for pid in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds")
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(picture, dpi=110)


def _kind(event: dict[str, Any]) -> str | None:
    category = event.get("cat")
    if category == "wait":
        return "space" if event.get("args", {}).get("for") in ("space", "budget") else "input"
    return category if category in _COLOURS else None
