"""How an overview is laid out for a terminal. Pure: data in, rich tables out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Rates = Mapping[int, float]  # by incarnation: rounds, items, versions a second


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def bar(share: float, width: int = 10) -> str:
    full = round(share * width)
    return "█" * full + "·" * (width - full)


def who(told: Mapping[str, Any] | None) -> str:
    return f"{told['name']} ({told['pid']})" if told else "-"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        right = column.lstrip("#") != column
        table.add_column(column.lstrip("#"), justify="right" if right else "left", overflow="fold")
    return table


def broker(seen: Mapping[str, Any]) -> RenderableType:
    told = seen["broker"]
    parts = [
        f"broker {told['pid']}, version {told['version']}, up {span(told['uptime'])}, in {told['directory']}",
        f"{told['sessions']} sessions, {told['things']} events, channels and arrays, {size(told['bytes'])} of memory",
    ]
    bad = {k: v for k, v in seen["counts"].items() if v and k in ("deaths", "leases_out", "bad_messages", "condemned")}
    if bad:
        parts.append(", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in sorted(bad.items())))
    return Text("\n".join(parts))


def sessions(seen: Mapping[str, Any]) -> RenderableType:
    table = _table("sessions", "name", "#pid", "namespace", "state", "#attached", "#silent")
    for told in seen["sessions"]:
        state = told["state"] if told["process"] == "running" else f"{told['state']}, {told['process']}"
        table.add_row(
            told["name"], str(told["pid"]), told["namespace"], state, str(told["attached"]), span(told["silent"])
        )
    return table


def events(seen: Mapping[str, Any], per_second: Rates | None = None) -> RenderableType:
    table = _table("events", "name", "namespace", "device", "#issued", "#completed", "#a second", "recorder", "state")
    for told in seen["events"]:
        table.add_row(
            told["name"],
            told["namespace"],
            told["device"],
            str(told["issued"]),
            str(told["completed"]),
            _rate(told, per_second),
            who(told["recorder"]),
            _state(told),
        )
    return table


def channels(seen: Mapping[str, Any], per_second: Rates | None = None) -> RenderableType:
    columns = ("name", "namespace", "device", "#item", "#items", "#a second", "full", "writer", "readers", "state")
    table = _table("channels", *columns)
    for told in seen["channels"]:
        depth = told["depth"]
        table.add_row(
            told["name"],
            told["namespace"],
            told["device"],
            size(told.get("item_bytes", 0)),
            str(told["completed"]),
            _rate(told, per_second),
            f"{bar(told['occupancy'])} {round(told['occupancy'] * depth)}/{depth}",
            who(told["recorder"]),
            ", ".join(_reader(r) for r in told["readers"]) or "-",
            "ended" if told.get("stream_ended") else _state(told),
        )
    return table


def arrays(seen: Mapping[str, Any], per_second: Rates | None = None) -> RenderableType:
    table = _table("arrays", "name", "namespace", "device", "#bytes", "#version", "#a second", "writer", "#readers")
    for told in seen["arrays"]:
        table.add_row(
            told["name"],
            told["namespace"],
            told["device"],
            size(told["bytes"]),
            str(told["completed"]),
            _rate(told, per_second),
            who(told["recorder"]),
            str(len(told["readers"])),
        )
    return table


def everything(seen: Mapping[str, Any], per_second: Rates | None = None) -> RenderableType:
    """All there is; sections without entries are left out."""
    parts: list[RenderableType] = [broker(seen)]
    sections: Iterable[tuple[str, RenderableType]] = (
        ("sessions", sessions(seen)),
        ("channels", channels(seen, per_second)),
        ("arrays", arrays(seen, per_second)),
        ("events", events(seen, per_second)),
    )
    for key, section in sections:
        if seen[key]:
            parts += [Text(), section]
    return Group(*parts)


def _rate(told: Mapping[str, Any], per_second: Rates | None) -> str:
    found = (per_second or {}).get(told["incarnation"])
    return "" if found is None else f"{found:.1f}"


def _state(told: Mapping[str, Any]) -> str:
    if told["verdict"] is not None:
        return f"condemned from {told['verdict']}"
    return "ok" if told["named"] else "unlinked"


def _reader(told: Mapping[str, Any]) -> str:
    name = told["reader"]["name"] if told["reader"] else "?"
    skipped = f", {told['skipped']} skipped" if told["skipped"] else ""
    return f"{name} ({told['held']} held, {told['behind']} behind{skipped})"
