"""The CPU's part: round trips, items, and what ``import ipcsync`` takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from .contest import Contestant, Missing, Table, arena, compete, summary
from .flows import FLOWS, READERS
from .trips import TRIPS

SIZES = {"1 KiB": ((1024,), 2000), "64 KiB": ((65536,), 500), "1080p frames, 6.2 MB": ((1080, 1920, 3), 30)}


def round_trip(*, quick: bool, missing: list[Missing]) -> list[Table]:
    """Microseconds for one round trip between two processes."""
    count = 100 if quick else 1000

    def run(one: Contestant, case: int, numbers: range) -> list[float]:
        clock, took = time.perf_counter, []
        for number in numbers:
            start = clock()
            one.turn(case, number)
            took.append(1e6 * (clock() - start))
        return took[count // 10 :]  # the child has just woken up

    with arena():
        found = compete([kind() for kind in TRIPS], 2 if quick else 20, [(0, count)], run, missing)
    table = Table("round-trip", "round trip of two processes", "µs", TRIPS[0].name)
    table.rows = {name: summary(repeats) for (name, _), repeats in found.items()}
    return [table]


def channel(*, quick: bool, missing: list[Missing]) -> list[Table]:
    """Items a second from one writer, until the last of its readers has the last of them."""

    readers = (1, 2) if quick else READERS
    shapes = [shape for shape, _ in SIZES.values()]
    cases = []
    for at, (_, count) in enumerate(SIZES.values()):
        cases += [(at * len(readers) + i, 10 if quick else count) for i in range(len(readers))]
    with arena():
        found = compete([kind(shapes, readers) for kind in FLOWS], 2 if quick else 9, cases, None, missing)
    counts, tables = dict(cases), []
    for at, size in enumerate(SIZES):
        for i, count in enumerate(readers):
            who = "one reader" if count == 1 else f"{count} readers"
            title = f"items of {size}, one writer, {who}"
            table = Table(f"channel-{at}-{count}", title, "items/s", FLOWS[0].name, more_is_better=True)
            case = at * len(readers) + i
            for kind in FLOWS:
                repeats = found.get((kind.name, case))
                if repeats:
                    table.rows[kind.name] = summary([[counts[case] / took for took in each] for each in repeats])
            tables.append(table)
    return tables


def imports(*, quick: bool, missing: list[Missing]) -> list[Table]:
    """What ``import ipcsync`` adds to a bare interpreter."""
    took: dict[str, list[float]] = {"python -c pass": [], "python -c 'import ipcsync'": []}
    for _ in range(3 if quick else 15):
        for name, code in zip(took, ("pass", "import ipcsync"), strict=True):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
            took[name].append(1e3 * (time.perf_counter() - start))
    table = Table("import", "starting an interpreter", "ms")
    table.rows = {name: summary([times]) for name, times in took.items()}
    return [table]
