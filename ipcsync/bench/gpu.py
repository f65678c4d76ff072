"""The GPU's part: run in a process of its own, once without MPS and once under a private MPS daemon."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .. import queues
from .calls import calls
from .contest import Contestant, Missing, Table, arena, compete, summary
from .floor import Floor, NoFloor, build
from .gpu_flows import CASES, HAND_OFFS, PIPELINES, SHAPE
from .gpu_trips import BARE, GPU_TRIPS, SPIN_US, WITH_KERNELS

LIMIT = 110.0  # seconds for one mode; what was measured by then is kept
FLOOR_TRIP = {"m": "C floor: memory operations", "e": "C floor: IPC events"}
FLOOR_COST = {
    "w": "C: cuStreamWriteValue64",
    "a": "C: cuStreamWaitValue64",
    "r": "C: cudaEventRecord",
}


class CFloor(Contestant):
    """floor.cu, as a contestant in the round trip."""

    peers = 0

    def __init__(self, floor: Floor, kind: str) -> None:
        self.floor, self.kind = floor, kind
        self.name = FLOOR_TRIP[kind]  # type: ignore[misc]

    def plays(self, case: int) -> bool:
        return case == BARE

    def measure(self, case: int, numbers: range) -> list[float]:
        return [self.floor.ask(self.kind, len(numbers))]


def _measured(one: Any, case: int, numbers: range) -> list[float]:
    found: list[float] = one.measure(case, numbers)
    return found


def on(
    device: str, *, quick: bool, missing: list[Missing], keep: Callable[[list[Table]], None] = lambda _: None
) -> list[Table]:
    """All of it, on the streams of `device` (cpu: what needs neither CUDA nor C, to see that it works)."""
    with ExitStack() as stack:
        floor: Floor | None = None
        if device != "cpu":
            try:
                floor = Floor(build(Path(stack.enter_context(TemporaryDirectory()))))
                stack.callback(floor.close)
            except (NoFloor, OSError) as error:
                missing.append(Missing("the C floor", str(error)))
        tables = []
        parts: list[Callable[..., list[Table]]] = [trips, hand_offs, three_stages]
        for part in parts:
            start = time.monotonic()
            try:
                tables += part(device, floor, quick=quick, missing=missing)
            except Exception as error:
                missing.append(Missing(part.__name__.replace("_", " "), f"{type(error).__name__}: {error}"))
            keep(tables)
            print(f"{part.__name__}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        try:
            cost = calls(device, quick=quick, missing=missing)
            if floor is not None:
                for kind, name in FLOOR_COST.items():
                    cost[0].rows[name] = summary([[floor.ask(kind, 200) for _ in range(5 if quick else 25)]])
            tables += cost
            keep(tables)
        except Exception as error:
            missing.append(Missing("calls", f"{type(error).__name__}: {error}"))
        return tables


def _some(kinds: list[Any], device: str) -> list[Any]:
    """On the CPU only what is ours: the peers are made of CUDA."""
    ours = ("ipcsync.bench.gpu_trips", "ipcsync.bench.gpu_flows")
    cuda_only = ("ByTorchQueue", "BySameTensor", "BySyncAndMessage", "ByHandles")
    return [
        kind(device)
        for kind in kinds
        if device != "cpu" or (kind.__module__ in ours and kind.__name__ not in cuda_only)
    ]


def trips(device: str, floor: Floor | None, *, quick: bool, missing: list[Missing]) -> list[Table]:
    repeats, count, hops = (2, 50, 20) if quick else (7, 1000, 200)
    contestants: list[Contestant] = _some(GPU_TRIPS, device)
    if floor is not None:
        contestants += [CFloor(floor, kind) for kind in FLOOR_TRIP]
    with arena():
        found = compete(contestants, repeats, [(BARE, count), (WITH_KERNELS, hops)], _measured, missing)
    ours = GPU_TRIPS[0].name
    trip = Table("gpu-round-trip", "GPU round trip of two processes", "µs", ours)
    trip.rows = {name: summary(each) for (name, case), each in found.items() if case == BARE}
    trip.note = f"the mean of a chain of {count}; no kernels"
    hop = Table("gpu-hop", "hop: one process's kernel ends, another's begins", "µs", ours)
    hop.rows = {name: summary(each) for (name, case), each in found.items() if case == WITH_KERNELS}
    hop.note = f"by the GPU's own clock; the first kernel runs for {SPIN_US} µs"
    return [trip, hop]


def hand_offs(device: str, floor: Floor | None, *, quick: bool, missing: list[Missing]) -> list[Table]:
    repeats, count = (2, 10) if quick else (7, 200)
    with arena():
        cases = [(case, count) for case in CASES]
        found = compete(_some(HAND_OFFS, device), repeats, cases, _measured, missing)
    size, ours = f"{SHAPE[0] * SHAPE[1] * SHAPE[2] / 1e6:.1f} MB", HAND_OFFS[0].name
    tables = [Table("gpu-hand-off", f"hand-off of {size} and its acknowledgement, one at a time", "µs", ours)]
    tables += [Table(f"gpu-hand-off-{n}", f"hand-off of {size}, {n} under way", "µs an item", ours) for n in CASES[1:]]
    for table, which in zip(tables, CASES, strict=True):
        table.rows = {name: summary(each) for (name, case), each in found.items() if case == which}
    return tables


def three_stages(device: str, floor: Floor | None, *, quick: bool, missing: list[Missing]) -> list[Table]:
    repeats, count = (2, 20) if quick else (7, 500)
    with arena():
        found = compete(_some(PIPELINES, device), repeats, [(0, count)], None, missing)
    table = Table("gpu-stages", "three stages on one GPU", "items/s", PIPELINES[0].name, more_is_better=True)
    table.rows = {
        name: summary([[count / took for took in each] for each in repeated]) for (name, _), repeated in found.items()
    }
    return [table]


def gpu(*, mps: bool, quick: bool, missing: list[Missing]) -> list[Table]:
    """Both modes, each in a process of its own, since a process joins MPS when it starts CUDA, and not later."""
    from ..backends import select

    if not select.has_cuda():
        missing.append(Missing("gpu", "no CUDA device was found; `ipcsync doctor` says what is missing"))
        return []
    tables = _mode("without MPS", dict(os.environ), quick=quick, missing=missing)
    if not mps:
        missing.append(Missing("gpu, under MPS", "--no-mps"))
        return tables
    from ..errors import IpcSyncError
    from ..mps import Daemon

    with TemporaryDirectory(dir="/dev/shm", prefix="ipcsync-bench-mps-") as name:
        daemon = Daemon(Path(name))
        try:
            daemon.start()
        except IpcSyncError as error:
            missing.append(Missing("gpu, under MPS", str(error)))
            return tables
        try:
            tables += _mode("under MPS", {**os.environ, **daemon.environment()}, quick=quick, missing=missing)
        finally:
            daemon.stop()
    return tables


def _mode(mode: str, env: dict[str, str], *, quick: bool, missing: list[Missing]) -> list[Table]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "ipcsync.bench.gpu", "cuda:0", str(out), *(["--quick"] if quick else [])]
        process = subprocess.Popen(command, env=env, start_new_session=True)  # so that its children end with it
        try:
            status = process.wait(LIMIT)
            if status:
                missing.append(Missing(f"gpu, {mode}", f"its process ended with status {status}"))
        except subprocess.TimeoutExpired:
            missing.append(Missing(f"gpu, {mode}: the rest", f"it did not end within {LIMIT:g} s"))
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        if not out.exists():
            return []
        said = json.loads(out.read_text())
    missing += [Missing(f"{each['what']}, {mode}", each["why"]) for each in said["not_measured"]]
    tables = [Table(**table) for table in said["tables"]]
    for table in tables:
        table.key, table.title = f"{table.key}-{mode.replace(' ', '-')}", f"{table.title}, {mode}"
    return tables


def main(device: str, out: str, *options: str) -> None:
    queues.ask(os.environ)
    missing: list[Missing] = []

    def keep(tables: list[Table]) -> None:
        result: dict[str, Any] = {
            "tables": [dataclasses.asdict(table) for table in tables],
            "not_measured": [dataclasses.asdict(each) for each in missing],
        }
        partial = Path(f"{out}.partial")
        partial.write_text(json.dumps(result))
        partial.replace(out)

    keep(on(device, quick="--quick" in options, missing=missing, keep=keep))


if __name__ == "__main__":
    main(*sys.argv[1:])
