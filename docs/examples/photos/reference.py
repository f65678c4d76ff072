"""The same pictures in one process, without ipcsync: python reference.py IMAGES OUT. The tests compare the files."""

from __future__ import annotations

import sys
from pathlib import Path

import imaging


def main(images: Path, out: Path, height: int = 512, width: int = 512) -> None:
    """Does to every picture of `images` what the pipeline does, and writes what its `write` stage writes."""
    out.mkdir(parents=True, exist_ok=True)
    paths = imaging.files(images)
    thumbnails = []
    for path, name in imaging.names(paths).items():
        try:
            picture = imaging.load(path, height, width)
        except imaging.NotAnImage:
            continue
        edges = imaging.find_edges(picture)
        imaging.save(edges, out / f"{name}.png")
        thumbnails.append(imaging.thumbnail(edges))
    if thumbnails:
        imaging.save(imaging.contact_sheet(thumbnails), out / "contact-sheet.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
