"""The four stages that pipeline.toml names."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import imaging
import numpy as np

from ipcsync_workers import Stage, per_item


def read(stage: Stage) -> None:
    """Every picture of the folder, fitted to the frame. What is no picture is named, counted and passed over."""
    paths = imaging.files(Path(stage.params["folder"]).expanduser())
    names = imaging.names(paths)
    stage.expect(len(paths))
    for path in paths:
        with stage.output.slot(meta={"name": names[path], "file": imaging.shown(path.name)}) as slot:
            height, width, _ = slot.array.shape
            try:
                picture = imaging.load(path, height, width, stage.params.get("fit", "letterbox"))
            except imaging.NotAnImage as why:
                print(f"passed over {path.name}: {why}")
                stage.count("passed over")
                slot.discard()
                continue
            slot.array[...] = stage.xp.asarray(picture)


@per_item
def edges(array: Any, out: Any, meta: dict[str, Any], *, xp: Any, slow: float = 0.0) -> None:
    """The edges of one picture. `slow`: seconds that each takes longer, for a bottleneck to look for in a trace."""
    time.sleep(slow)
    out[...] = imaging.find_edges(array, xp)


def write(stage: Stage) -> None:
    """One PNG a picture, and at the end a contact sheet."""
    folder = Path(stage.params["folder"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    thumbnails = []
    for slot in stage.input.slots():
        picture = stage.to_host(slot.array)
        imaging.save(picture, folder / f"{slot.meta['name']}.png")
        thumbnails.append(imaging.thumbnail(picture))
    if thumbnails:
        imaging.save(imaging.contact_sheet(thumbnails), folder / "contact-sheet.png")
        print(f"{len(thumbnails)} pictures and contact-sheet.png are in {folder.absolute()}")


def histogram(stage: Stage) -> None:
    """How often each strength of edge occurs, over all pictures: histogram.csv."""
    total = np.zeros(256, np.int64)
    for slot in stage.input.slots():
        total += stage.to_host(stage.xp.bincount(slot.array.ravel(), minlength=256))
    folder = Path(stage.params["folder"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "histogram.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["strength", "pixels"])
        rows.writerows(enumerate(total.tolist()))
