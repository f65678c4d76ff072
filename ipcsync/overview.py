"""One picture of a broker, its sessions and what they share, for ``ipcsync status``, the broker's page and its metrics.

The broker tells what exists (``ask.py``); how far it has come is read from the ledger and the control files, so that a
look costs the broker one message however much there is. All of it is plain data: it is also ``ipcsync status --json``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import linux, runtime
from .errors import IpcSyncError
from .host_waits import OUTCOMES
from .ledger import FOREVER, Block, Cell, Header, Ledger
from .ring import Buffer, Control, Group, Head, Reader, open_control

KINDS = ("events", "channels", "arrays")


def overview(directory: Path, status: Mapping[str, Any]) -> dict[str, Any]:
    """The picture. `status` is the broker's answer; lists have at most the 1,000 entries that it has."""
    ledger = Ledger.open(directory / runtime.LEDGER)
    try:
        return _Reading(directory, ledger, status).all()
    finally:
        ledger.region.close()


def rates(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> dict[int, float]:
    """By incarnation, what completed a second between two overviews."""
    if before is None or seconds <= 0:
        return {}
    was = {t["incarnation"]: t["completed"] for kind in KINDS for t in before[kind]}
    things = [t for kind in KINDS for t in now[kind] if t["incarnation"] in was]
    return {t["incarnation"]: (t["completed"] - was[t["incarnation"]]) / seconds for t in things}


class _Reading:
    def __init__(self, directory: Path, ledger: Ledger, status: Mapping[str, Any]) -> None:
        self.directory, self.ledger, self.status = directory, ledger, status
        self.words = ledger.words
        self.by_number = {s["session"]: s for s in status["sessions"]}

    def all(self) -> dict[str, Any]:
        words, status = self.words, self.status
        things = [self._thing(told) for told in status["things"]]
        return {
            "broker": {
                "pid": int(words[Header.PID]),
                "version": status["version"],
                "uptime": status["uptime"],
                "directory": str(self.directory),
                "tick_age": max(0, time.monotonic_ns() - words[Header.TICK]) / 1e9,
                "sessions": status["sessions_total"],
                "things": status["things_total"],
                "bytes": status["bytes"],
                "announced": status["seq"],
                "loop": status.get("loop", {}),
            },
            "quotas": status["quotas"],
            "counts": status["counts"],
            "sessions": [self._session(told) for told in status["sessions"]],
            "events": [t for t in things if t["kind"] == "event"],
            "channels": [t for t in things if t["kind"] == "channel"],
            "arrays": [t for t in things if t["kind"] == "array"],
        }

    def _session(self, told: Mapping[str, Any]) -> dict[str, Any]:
        found = {**told, "process": self._process(told)}
        block = told.get("block")
        if block is not None:
            at = self.ledger.block(block) + Block.COUNTS
            found["long_waits"] = {name: int(self.words[at + i]) for i, name in OUTCOMES.items()}
            found["announcement_gaps"] = int(self.words[self.ledger.block(block) + Block.GAPS])
        return found

    def _process(self, told: Mapping[str, Any]) -> str:
        state = linux.process_state(told["pid"])
        if state is None:
            return "gone"
        return "stopped" if state[0] in "Tt" else "zombie" if state[0] in "ZX" else "running"

    def _thing(self, told: Mapping[str, Any]) -> dict[str, Any]:
        words, at = self.words, self.ledger.cell(told["cell"])
        verdict = int(words[at + Cell.VERDICT])
        found = {
            **told,
            "issued": int(words[at + Cell.ISSUED]),
            "completed": self.ledger.completed(told["cell"]),
            "verdict": None if verdict in (0, FOREVER) else verdict,
            "recorder": self._who(told["pen"]),
        }
        if told["kind"] == "event":
            return found
        try:
            control = open_control(self.directory / f"ctl-{told['incarnation']}")
        except (OSError, IpcSyncError):
            return {**found, "depth": 0, "readers": [], "occupancy": 0.0, "ended": True}  # it went away meanwhile
        try:
            readers = list(self._readers(control, found["issued"]))
            found |= {"depth": control.depth, "max_readers": control.max_readers, "readers": readers}
            if control.depth:
                used = max((r["held"] + r["behind"] for r in readers), default=0)
                found |= {
                    "occupancy": min(1.0, used / control.depth),
                    "epoch": int(control.words[Head.EPOCH]),
                    "stream_ended": bool(control.words[Head.END_AT]),
                    "item_bytes": told["bytes"] // control.depth,
                }
        finally:
            control.region.close()
        return found

    def _who(self, number: int) -> dict[str, Any] | None:
        told = self.by_number.get(number)
        return told and {"session": number, "name": told["name"], "pid": told["pid"]}

    def _readers(self, control: Control, issued: int) -> Iterator[dict[str, Any]]:
        words = control.words
        by_block = {s["block"]: s["session"] for s in self.status["sessions"] if "block" in s}
        for cell in range(control.max_readers):
            at = control.reader(cell)
            if words[at + Reader.STATE] == Reader.FREE:
                continue
            held, behind = reader_load(control, at, issued)
            latest = words[at + Reader.POLICY] == Reader.LATEST
            yield {
                "reader": self._who(by_block.get(int(words[at + Reader.OWNER]) - 1, 0)),
                "policy": "latest" if latest else "block",
                "retired": bool(words[at + Reader.STATE] == Reader.RETIRED),
                "held": held,
                "behind": behind,
                "skipped": int(words[at + Reader.SKIPPED]) if control.depth else 0,
                "taken": _next(control, at) - 1
                if control.depth
                else sum(int(words[i + Reader.BEGUN]) for i in range(at, at + Reader.LANES)),
            }


def reader_load(control: Control, at: int, issued: int) -> tuple[int, int]:
    """(buffers that a reader holds, published items that it has still to take); of an array: (reads under way, 0)."""
    words = control.words
    if not control.depth:
        lanes = range(at, at + Reader.LANES)
        return sum(max(0, int(words[i + Reader.BEGUN]) - int(words[i + Reader.RELEASED])) for i in lanes), 0
    held = 0
    for b in range(control.depth):
        item = words[control.buffers[b] + Buffer.ITEM]
        held += bool(words[at + control.released + b] < item <= words[at + control.taken + b])
    if words[at + Reader.POLICY] == Reader.LATEST:
        return held, 0  # what it has not taken it may have to miss
    last = min(issued, int(words[at + Reader.UNTIL]))
    return held, max(0, last + 1 - _next(control, at))


def _next(control: Control, at: int) -> int:
    """The next item that a channel's reader takes: of a group's, the first that no member has."""
    words, group = control.words, int(control.words[at + Reader.GROUP])
    return int(words[control.group(group - 1) + Group.CURSOR] if group else words[at + Reader.CURSOR])
