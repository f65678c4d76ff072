"""The stages of the pictures' pipeline: they make things up, and take their time."""

from __future__ import annotations

import time
from typing import Any

from ipcsync_workers import Stage, per_item


def camera(stage: Stage) -> None:
    """`rate` frames a second, for `seconds`."""
    began = time.monotonic()
    frames = int(stage.params["rate"] * stage.params["seconds"])
    for frame in range(frames):
        time.sleep(max(0.0, began + frame / stage.params["rate"] - time.monotonic()))
        with stage.output.slot(meta={"frame": frame}) as slot:
            slot.array[...] = frame % 256


@per_item
def detect(array: Any, out: Any, meta: dict[str, Any], *, takes: float) -> None:
    time.sleep(takes)
    out[...] = array[0, 0, 0]


def consume(stage: Stage) -> None:
    for _ in stage.input.slots():
        time.sleep(stage.params["takes"])
