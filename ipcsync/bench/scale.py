"""A broker with many events and sessions: creating, attaching, a late session, announcements, memory, idle CPU.

Sessions are spread over a few processes, many in each: a session is a connection with a thread of its own.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ipcsync
from ipcsync import runtime

from .contest import Missing, Stuck, Table, arena, summary

PROCESSES = 4
IDLE = 5.0  # seconds over which the broker's idle CPU is measured


def _many(end: Connection, count: int, name: str) -> None:
    """A child: `count` sessions that each open the event `name` of every few; then told, waits to be let go."""
    sessions = []
    try:
        for _ in range(count):
            session = ipcsync.connect(timeout=60.0)
            sessions.append((session, session.open_event(name, timeout=60.0)))
        end.send("ready")
        end.recv()  # a name that is about to be created
        session = sessions[0][0]
        end.send("waiting")
        session.open_event(end.recv(), timeout=60.0)
        end.send(time.monotonic())
        end.recv()
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}")
    for session, _ in sessions:
        session.close(timeout=1.0)


def _heard(end: Connection, wanted: type = str) -> Any:
    if not end.poll(120.0):
        raise Stuck("a process with sessions said nothing for 120 s")
    said = end.recv()
    if not isinstance(said, wanted) or (wanted is str and said not in ("ready", "waiting")):
        raise Stuck(str(said))
    return said


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, to the nanosecond: its CPU clock, which any process may read."""
    return time.clock_gettime(~pid << 3 | 2)


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def late(directory: Path, repeats: int) -> list[float]:
    """Milliseconds until a session that comes late is ready to wait: connected, and an event opened."""
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        with ipcsync.connect(directory) as session:
            event = session.open_event("scale-0")
            event.query()
            took.append(1e3 * (time.perf_counter() - start))
    return took


def record_us(event: Any) -> list[float]:
    took = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            event.record()
        took.append(1e6 * (time.perf_counter() - start) / 500)
    return took


def one(events: int, sessions: int, *, quick: bool) -> dict[str, dict[str, float]]:
    """Figures of one broker: name -> summary."""
    found: dict[str, dict[str, float]] = {}
    context = get_context("spawn")
    with arena() as directory, ipcsync.connect(default_timeout=60.0) as session, ExitStack() as stack:
        pid = runtime.broker_pid(directory)
        assert pid
        before = rss_mib(pid)
        took, kept = [], []
        for number in range(events):
            start = time.perf_counter()
            kept.append(session.create_event(f"scale-{number}", device="cpu"))
            took.append(1e3 * (time.perf_counter() - start))
        found["create an event, ms"] = summary([took])
        processes = min(PROCESSES, sessions)
        ends = []
        start = time.perf_counter()
        for place in range(processes):
            mine, theirs = context.Pipe()
            count = sessions // processes + (place < sessions % processes)
            child = context.Process(target=_many, args=(theirs, count, f"scale-{place}"), daemon=True)
            child.start()
            stack.callback(child.join, 20)
            ends.append(mine)
        for end in ends:
            _heard(end)
        found["attach a session, ms (all side by side, processes started)"] = summary(
            [[1e3 * (time.perf_counter() - start) / sessions]]
        )
        found["late session ready, ms"] = summary([late(directory, 5 if quick else 30)])
        for end in ends:
            end.send("about to")
            _heard(end)
        for end in ends:
            end.send("scale-late")
        time.sleep(0.05)
        now = time.monotonic()
        kept.append(session.create_event("scale-late", device="cpu"))
        found["announced to all, ms"] = summary([[1e3 * (_heard(end, float) - now) for end in ends]])
        spent, start = cpu_seconds(pid), time.monotonic()
        time.sleep(0.5 if quick else IDLE)
        found["broker's idle CPU, %"] = summary([[100 * (cpu_seconds(pid) - spent) / (time.monotonic() - start)]])
        found["broker's memory, MiB"] = summary([[rss_mib(pid)]])
        found["... more than with none, MiB"] = summary([[rss_mib(pid) - before]])
        found["SharedEvent.record, µs"] = summary([record_us(kept[-1])])
        start = time.perf_counter()
        for end in ends:
            end.send("go")
        session.close(timeout=60.0)
        found["close the session with all events, s"] = summary([[time.perf_counter() - start]])
    return found


def scale(*, quick: bool, missing: list[Missing]) -> list[Table]:
    sizes = [(10, 2), (200, 8)] if quick else [(10, 1), (100, 20), (1000, 100), (10_000, 200)]
    tables = []
    for events, sessions in sizes:
        table = Table(f"scale-{events}-{sessions}", f"one broker, {events:,} events, {sessions} sessions", "")
        try:
            table.rows = one(events, sessions, quick=quick)
        except Exception as error:
            missing.append(Missing(table.title, f"{type(error).__name__}: {error}"))
            continue
        tables.append(table)
    return tables
