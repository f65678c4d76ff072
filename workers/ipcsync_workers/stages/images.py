"""Pictures of a folder. Needs Pillow (``pip install 'ipcsync[images]'``).

::

    [stages.read]
    call = "ipcsync_workers.stages.images:read"
    outputs = ["frames"]                      # [height, width, 3] or [height, width] of uint8
    params = { folder = "images", fit = "letterbox" }

    [stages.write]
    call = "ipcsync_workers.stages.images:write"
    inputs = ["edges"]
    params = { folder = "out", format = "png" }
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ipcsync.errors import InvalidArgument

from ..stage import Stage
from ._files import listed, shown, target, whole

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
FITS = ("letterbox", "stretch", "crop")


def read(stage: Stage) -> None:
    """Every picture of ``folder``, turned upright and fitted to the channel: ``fit`` is ``letterbox`` (whole, with
    bars), ``stretch`` or ``crop``. The meta has its ``name`` and ``file``. What cannot be read is named and counted."""
    paths, fit = listed(stage, SUFFIXES), stage.params.get("fit", "letterbox")
    if fit not in FITS:
        raise InvalidArgument(f"fit is one of {', '.join(FITS)}, not {fit!r}")
    stems = [path.stem for path in paths]
    for path in _after(stage, paths):
        name = path.stem if stems.count(path.stem) == 1 else path.name
        with stage.output.slot(meta={"name": shown(name), "file": shown(path.name)}) as slot:
            try:
                picture = load(path, slot.array.shape, fit)
            except OSError as error:
                print(f"passed over {shown(path.name)}: {error}")
                stage.count("passed over")
                slot.discard()
                continue
            stage.put(slot.array, picture)


def _after(stage: Stage, paths: list[Path]) -> list[Path]:
    """Those still to be read: what was passed over in an earlier life made no item, and so has to be looked at."""
    left = stage.resumed_at
    while left and paths:
        left -= _readable(paths[0])
        paths = paths[1:]
    return paths


def _readable(path: Path) -> bool:
    try:
        load(path, (1, 1), "stretch")
    except OSError:
        return False
    return True


def load(path: Path, shape: tuple[int, ...], fit: str) -> Any:
    """The picture as (height, width, 3) or (height, width) of uint8; ``OSError`` if it cannot be read."""
    from PIL import Image, ImageOps

    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] != 3):
        raise InvalidArgument(f"pictures need a channel of shape [height, width, 3] or [height, width], not {shape}")
    size = shape[1], shape[0]
    try:
        with Image.open(path) as opened:
            upright = ImageOps.exif_transpose(opened)
            picture = upright.convert("L" if len(shape) == 2 else "RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise OSError(str(error) or type(error).__name__) from None
    if fit == "letterbox":
        picture = ImageOps.pad(picture, size, Image.Resampling.BICUBIC)
    elif fit == "crop":
        picture = ImageOps.fit(picture, size, Image.Resampling.BICUBIC)
    else:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(picture)


def write(stage: Stage) -> None:
    """One file an item, in ``folder``, as ``format`` (png, jpeg, webp, ...), named by the ``name`` in its meta. Each
    appears whole or not at all."""
    from PIL import Image

    kind = str(stage.params.get("format", "png")).lower()
    for slot in stage.input.slots():
        picture = stage.to_host(slot.array)
        if picture.dtype != np.uint8:
            raise InvalidArgument(f"a picture is of uint8, not {picture.dtype}: put a filter before this stage")
        with whole(target(stage, slot, "." + kind.replace("jpeg", "jpg"))) as path:
            Image.fromarray(np.ascontiguousarray(picture)).save(path, format=kind.replace("jpg", "jpeg"))
        stage.count("written")
