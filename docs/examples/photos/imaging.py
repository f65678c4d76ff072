"""What is done to a picture. Plain functions of arrays: the pipeline's stages use them, and so does reference.py."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SHEET_WIDTH = 128  # pixels of a picture on the contact sheet


class NotAnImage(Exception):
    """The file is no picture that Pillow can read; the message says why."""


def files(folder: Path) -> list[Path]:
    """The folder's files, by name."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.absolute()} is no folder: name one with --set stages.read.params.folder=DIR")
    return sorted(path for path in folder.iterdir() if path.is_file())


def names(paths: list[Path]) -> dict[Path, str]:
    """A name for each file's results: without its suffix, unless that would make two the same."""
    stems = [path.stem for path in paths]
    return {path: shown(path.stem if stems.count(path.stem) == 1 else path.name) for path in paths}


def shown(name: str) -> str:
    """A file's name as text for a slot's meta: names are bytes, and need not be UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def load(path: Path, height: int, width: int, fit: str = "letterbox") -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The picture as (height, width, 3) of uint8, whatever its size and mode; ``NotAnImage`` if it is none."""
    try:
        with Image.open(path) as opened:
            picture = to_rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError:
        raise NotAnImage("no image") from None
    except Exception as error:  # cut off, damaged, enormous, unreadable: decoders raise whatever they stumble over
        raise NotAnImage(str(error) or type(error).__name__) from None
    if fit == "letterbox":
        picture = ImageOps.pad(picture, (width, height), Image.Resampling.BICUBIC)
    elif fit == "stretch":
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    else:
        raise ValueError(f"fit is 'letterbox' or 'stretch', not {fit!r}")
    return np.asarray(picture)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Any mode as RGB: 16 bits and floats brought to 8, what is transparent laid on white."""
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode in ("I", "F"):  # 32 bits: nothing says what is white, so the brightest pixel is
        values = np.nan_to_num(np.asarray(picture, np.float64))
        low, high = values.min(), max(values.max(), values.min() + 1)
        return Image.fromarray(((values - low) * (255 / (high - low))).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")


def find_edges(picture: Any, xp: ModuleType = np) -> Any:
    """(height, width, 3) of uint8 -> (height, width) of uint8: grey, Gaussian blur, magnitude of the Sobel gradient.

    `xp` is numpy or cupy. All is whole numbers but for one square root, of a number below 2^24, and IEEE arithmetic
    rounds that in one way: every device gives the same picture.
    """
    rgb = picture.astype(xp.int32)
    grey = (77 * rgb[..., 0] + 150 * rgb[..., 1] + 29 * rgb[..., 2] + 128) >> 8
    blurred = (_blur(_blur(grey, 0, xp), 1, xp) + 128) >> 8
    padded = xp.pad(blurred, 1, mode="edge")
    smooth_down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    smooth_across = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    across = smooth_down[:, 2:] - smooth_down[:, :-2]
    down = smooth_across[2:] - smooth_across[:-2]
    magnitude = xp.sqrt((across * across + down * down).astype(xp.float32)).astype(xp.int32)
    return xp.minimum(magnitude, 255).astype(xp.uint8)


def _blur(grey: Any, axis: int, xp: ModuleType) -> Any:
    """Along one axis by (1, 4, 6, 4, 1): 16 times a Gaussian of sigma 1."""
    widths = [(0, 0), (0, 0)]
    widths[axis] = (2, 2)
    padded = xp.pad(grey, widths, mode="edge")
    length = grey.shape[axis]
    total = xp.zeros_like(grey)
    for shift, weight in enumerate((1, 4, 6, 4, 1)):
        part = padded[shift : shift + length] if axis == 0 else padded[:, shift : shift + length]
        total += weight * part
    return total


def save(edges: np.ndarray[Any, Any], path: Path) -> None:
    """Writes one picture of edges, white on black, as PNG. It appears whole or not at all."""
    partial = path.with_name(f".{zlib.crc32(path.name.encode()):08x}.part")  # a name may be as long as names can be
    Image.fromarray(edges).save(partial, format="PNG")
    partial.replace(path)


def thumbnail(edges: np.ndarray[Any, Any]) -> Image.Image:
    """The picture as it is on the contact sheet."""
    height = max(1, round(edges.shape[0] * SHEET_WIDTH / edges.shape[1]))
    return Image.fromarray(edges).resize((SHEET_WIDTH, height), Image.Resampling.BILINEAR)


def contact_sheet(thumbnails: list[Image.Image]) -> np.ndarray[Any, Any]:
    """All of them, in rows that make about a square."""
    columns = max(1, int(np.ceil(np.sqrt(len(thumbnails)))))
    rows = -(-len(thumbnails) // columns)
    width, height = thumbnails[0].size
    sheet = Image.new("L", (columns * width, rows * height))
    for place, picture in enumerate(thumbnails):
        sheet.paste(picture, (place % columns * width, place // columns * height))
    return np.asarray(sheet)
