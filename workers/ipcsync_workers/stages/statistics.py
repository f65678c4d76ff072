"""A sink that says what went by: smallest, largest, mean and standard deviation of each field, over all items.

::

    [stages.statistics]
    call = "ipcsync_workers.stages.statistics:statistics"
    inputs = ["frames"]
    params = { file = "statistics.json" }
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..stage import Stage
from ._files import whole


def statistics(stage: Stage) -> None:
    """Writes ``file`` when its input has ended: for each field ``items``, ``elements``, ``min``, ``max``, ``mean`` and
    ``std``. Without ``file`` it prints them. If it was started again: of the items of its last life, and it says so."""
    found: dict[str, Total] = {}
    for slot in stage.input.slots():
        for name in slot:
            found.setdefault(name, Total()).add(stage.xp, stage.here(slot[name]))
    result = {name: total.result() for name, total in found.items()}
    if stage.restarts:
        print(f"started again {stage.restarts} times: these are the items since")
    if "file" not in stage.params:
        print(json.dumps(result))
        return
    file = Path(stage.params["file"]).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole(file) as path:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


class Total:
    """The statistics of many arrays, taken together without keeping them (Chan, Golub and LeVeque)."""

    def __init__(self) -> None:
        self.items = self.elements = 0
        self.low, self.high, self.mean, self.squares = math.inf, -math.inf, 0.0, 0.0

    def add(self, xp: Any, array: Any) -> None:
        """One more array; where it is, on the CPU or a GPU, it is summed up."""
        self.items += 1
        if not array.size:
            return
        values = array.astype(xp.float64)
        mean = float(values.mean())
        squares = float(xp.square(values - mean).sum())
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        count = self.elements + array.size
        apart = mean - self.mean
        self.squares += squares + apart * apart * self.elements * array.size / count
        self.mean += apart * array.size / count
        self.elements = count

    def result(self) -> dict[str, Any]:
        """As plain data; None where there was no element."""
        if not self.elements:
            return {"items": self.items, "elements": 0, "min": None, "max": None, "mean": None, "std": None}
        return {
            "items": self.items,
            "elements": self.elements,
            "min": self.low,
            "max": self.high,
            "mean": self.mean,
            "std": math.sqrt(self.squares / self.elements),
        }
