"""Measures this machine's CPU side, ours and its peers in one run: ``python -m tests.benchmarks.host``.

All contestants stand ready at once and take turns, repeat by repeat, so that whatever else the machine does hits them
alike. Nothing is compared with numbers of another run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..harness import Broker, Runtime
from .flows import FLOWS, Flow
from .trips import TRIPS, Trip

SIZES = {"1 KiB": ((1024,), 2000), "64 KiB": ((65536,), 1000), "a 1080p frame, 6.2 MB": ((1080, 1920, 3), 60)}


def _serve(contestant: Any, commands: Connection) -> None:
    """The child: opens its end, then does as many echoes (or items) as it is told, until told 0."""
    contestant.open(child=True)
    commands.send("ready")
    number = 0
    while count := commands.recv():
        for _ in range(count):
            if isinstance(contestant, Trip):
                contestant.echo()
            else:
                contestant.produce(number)
                number += 1
    contestant.close()


@contextmanager
def standing_by(contestant: Trip | Flow, folder: Path) -> Iterator[Connection]:
    """The contestant with its child process; the connection takes counts."""
    context = get_context("spawn")
    contestant.prepare(context, folder)
    commands, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(contestant, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        contestant.open(child=False)
        assert commands.recv() == "ready"
        yield commands
        commands.send(0)
        child.join(30)
        contestant.close()
    finally:
        child.kill()
        child.join()


def interleaved(
    contestants: list[Any], repeats: int, run: Callable[[Any, Connection], list[float]]
) -> dict[str, list[list[float]]]:
    """`run` of each contestant in turn, `repeats` times after one to warm up: name -> what each repeat measured."""
    resource_tracker.ensure_running()  # now: what starts in the runtime directory's environment is ended with it
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ipcsync-bench-")))
        runtime = Runtime()
        stack.callback(runtime.remove)
        before = os.environ.get("IPCSYNC_RUNTIME_DIR")
        os.environ["IPCSYNC_RUNTIME_DIR"] = str(runtime.path)
        stack.callback(_restore, before)
        stack.callback(Broker(runtime.path).stop)
        ends = [(one, stack.enter_context(standing_by(one, folder))) for one in contestants]
        found: dict[str, list[list[float]]] = {one.name: [] for one in contestants}
        for repeat in range(repeats + 1):
            for one, commands in ends:
                measured = run(one, commands)
                if repeat:
                    found[one.name].append(measured)
        return found


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop("IPCSYNC_RUNTIME_DIR", None)
    else:
        os.environ["IPCSYNC_RUNTIME_DIR"] = before


def trips(repeats: int, count: int) -> dict[str, dict[str, float]]:
    """Microseconds for one round trip. ``best_us`` and ``worst_us`` are medians of one repeat: where the scheduler has
    put the two processes decides much, and changes only now and then."""

    def run(one: Trip, commands: Connection) -> list[float]:
        commands.send(count)
        clock, took = time.perf_counter, []
        for _ in range(count):
            start = clock()
            one.trip()
            took.append(1e6 * (clock() - start))
        return took[count // 10 :]  # the child has just woken up

    found = interleaved([kind() for kind in TRIPS], repeats, run)
    rows = {}
    for name, repeated in found.items():
        together = list(chain.from_iterable(repeated))
        medians = [statistics.median(took) for took in repeated]
        rows[name] = {
            "median_us": statistics.median(together),
            "p99_us": statistics.quantiles(together, n=100)[98],
            "best_us": min(medians),
            "worst_us": max(medians),
        }
    return rows


def flows(repeats: int, count: int, shape: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Items a second, one producer and one consumer."""
    numbers: dict[str, int] = {}

    def run(one: Flow, commands: Connection) -> list[float]:
        first = numbers.get(one.name, 0)
        numbers[one.name] = first + count
        commands.send(count)
        one.consume(first)
        start = time.perf_counter()
        for number in range(first + 1, first + count):
            one.consume(number)
        return [(count - 1) / (time.perf_counter() - start)]

    found = interleaved([kind(shape) for kind in FLOWS], repeats, run)
    return {
        name: {"median_per_s": statistics.median(rates), "min_per_s": min(rates), "max_per_s": max(rates)}
        for name, rates in ((name, list(chain.from_iterable(repeated))) for name, repeated in found.items())
    }


def imports(repeats: int) -> dict[str, float]:
    """Milliseconds that ``import ipcsync`` adds to a bare interpreter."""
    took: dict[str, list[float]] = {"pass": [], "import ipcsync": []}
    for _ in range(repeats):
        for code, times in took.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(1e3 * (time.perf_counter() - start))
    bare, ours = (statistics.median(times) for times in took.values())
    return {"bare_ms": bare, "with_import_ms": ours, "added_ms": ours - bare}


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": f"Linux {'.'.join(platform.release().split('-')[0].split('.')[:2])}",
        "python": platform.python_version(),
    }


def measure(*, quick: bool) -> dict[str, Any]:
    repeats = 2 if quick else 20
    return {
        "machine": machine(),
        "round_trip": trips(repeats, 100 if quick else 1000),
        "items": {size: flows(repeats, 5 if quick else count, shape) for size, (shape, count) in SIZES.items()},
        "import": imports(2 if quick else 15),
    }


def report(result: dict[str, Any]) -> str:
    """Tables for people. Each line says how it compares with ours, in this run."""
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items()), ""]
    ours = result["round_trip"]["ipcsync shared event"]["median_us"]
    lines += ["| round trip of two processes | median, µs | p99, µs | best, worst repeat, µs | ÷ ours |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {name} | {row['median_us']:.1f} | {row['p99_us']:.1f} | {row['best_us']:.1f}, {row['worst_us']:.1f} "
        f"| {row['median_us'] / ours:.2f} |"
        for name, row in result["round_trip"].items()
    ]
    for size, rows in result["items"].items():
        ours = rows["ipcsync channel"]["median_per_s"]
        lines += ["", f"| items of {size}, one writer, one reader | items a second | least, most | ours ÷ |"]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| {name} | {row['median_per_s']:,.0f} | {row['min_per_s']:,.0f}, {row['max_per_s']:,.0f} "
            f"| {ours / row['median_per_s']:.2f} |"
            for name, row in rows.items()
        ]
    added = result["import"]
    lines += ["", f"import ipcsync adds {added['added_ms']:.0f} ms to a bare interpreter's {added['bare_ms']:.0f} ms"]
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--quick", action="store_true", help="a few seconds: to see that it works, not to measure")
    options.add_argument("--json", type=Path, help="write the numbers to a file")
    given = options.parse_args()
    result = measure(quick=given.quick)
    print(report(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
