"""What a pipeline costs a stage: `ipcsync run` with more and more stages that copy, and the same in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from .contest import Missing, Table, summary

NBYTES = 65536
STAGES = """
from ipcsync_workers import Stage, per_item


def source(stage: Stage) -> None:
    for number in range(stage.params["items"]):
        with stage.output.slot() as slot:
            slot.array[...] = number & 0xFF


@per_item
def copy(array, out, meta):
    out[...] = array


def sink(stage: Stage) -> None:
    for slot in stage.input.slots():
        int(slot.array[0])
"""


def pipeline(middles: int, items: int) -> str:
    """A pipeline.toml: a source, `middles` stages that copy, a sink."""
    names = [f"c{i}" for i in range(middles + 1)]
    text = ['[pipeline]\nname = "bench"\ndevice = "cpu"\n']
    text += [f'[channels.{name}]\nshape = [{NBYTES}]\ndtype = "uint8"\ndepth = 8\n' for name in names]
    text.append(f'[stages.source]\ncall = "stages:source"\noutputs = ["c0"]\nparams = {{ items = {items} }}\n')
    for i in range(middles):
        text.append(f'[stages.copy{i}]\ncall = "stages:copy"\ninputs = ["c{i}"]\noutputs = ["c{i + 1}"]\n')
    text.append(f'[stages.sink]\ncall = "stages:sink"\ninputs = ["c{middles}"]\n')
    return "\n".join(text)


def stages(*, quick: bool, missing: list[Missing]) -> list[Table]:
    """Microseconds an item, from the first to the last."""
    items, repeats, middles = (100, 2, (0, 1)) if quick else (1000, 3, (0, 1, 2, 4))
    took: dict[str, list[float]] = {"in one process, 2 copies": []}
    took |= {f"ipcsync run, {n} stages between source and sink": [] for n in middles}
    with TemporaryDirectory(dir="/dev/shm", prefix="ipcsync-bench-") as name:
        folder = Path(name)
        (folder / "stages.py").write_text(STAGES)
        env = {**os.environ, "IPCSYNC_RUNTIME_DIR": str(folder / "runtime")}
        for _ in range(repeats):
            took["in one process, 2 copies"].append(1e6 * _alone(items) / items)
            for n in middles:
                file = folder / f"pipeline{n}.toml"
                file.write_text(pipeline(n, items))
                said = folder / "report.json"
                command = [sys.executable, "-c", "from ipcsync.cli import main; main()", "run", str(file)]
                done = subprocess.run(
                    [*command, "--json", str(said)], env=env, capture_output=True, text=True, timeout=120
                )
                if done.returncode:
                    missing.append(Missing("pipeline", f"`ipcsync run` ended with {done.returncode}: {done.stderr}"))
                    return []
                seconds = json.loads(said.read_text())["seconds"]
                took[f"ipcsync run, {n} stages between source and sink"].append(1e6 * seconds / items)
    table = Table("pipeline", f"an item of {NBYTES // 1024} KiB through a pipeline", "µs")
    table.rows = {name: summary([[each] for each in times]) for name, times in took.items()}
    table.note = f"{items} items a run, started and ended workers not counted; {os.cpu_count()} cores"
    return [table]


def _alone(items: int) -> float:
    import numpy as np

    first, second, third = (np.empty(NBYTES, np.uint8) for _ in range(3))
    start = time.perf_counter()
    for number in range(items):
        first[...] = number & 0xFF
        second[...] = first
        third[...] = second
        int(third[0])
    return time.perf_counter() - start
