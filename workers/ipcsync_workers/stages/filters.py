"""Filters of pictures, one in, one out: on numpy and on cupy, with the same result wherever the arithmetic is exact.

::

    [stages.small]
    call = "ipcsync_workers.stages.filters:resize"
    inputs = ["frames"]
    outputs = ["small"]
"""

from __future__ import annotations

from typing import Any

from ipcsync.errors import InvalidArgument

from ..stage import per_item


@per_item
def resize(array: Any, out: Any, meta: dict[str, Any], *, xp: Any, method: str = "bilinear") -> None:
    """To the height and width of the output; further axes stay. ``method``: ``bilinear`` or ``nearest``. A picture made
    much smaller should be blurred first."""
    if array.ndim < 2 or array.shape[2:] != out.shape[2:]:
        raise InvalidArgument(f"resize changes the first two axes: from {array.shape} to {out.shape} it cannot")
    if method == "nearest":
        rows, columns = (_nearest(array.shape[axis], out.shape[axis], xp) for axis in (0, 1))
        out[...] = array[rows][:, columns]
    elif method == "bilinear":
        made = array.astype(xp.float32)
        for axis in (0, 1):
            low, high, share = _between(array.shape[axis], out.shape[axis], xp)
            weight = share.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
            made = xp.take(made, low, axis) * (1 - weight) + xp.take(made, high, axis) * weight
        out[...] = xp.rint(made) if out.dtype.kind in "iu" else made
    else:
        raise InvalidArgument(f"method is 'bilinear' or 'nearest', not {method!r}")


def _nearest(length: int, wanted: int, xp: Any) -> Any:
    return (2 * xp.arange(wanted) + 1) * length // (2 * wanted)


def _between(length: int, wanted: int, xp: Any) -> tuple[Any, Any, Any]:
    """For each of `wanted` places: the two of `length` beside it, and the second one's share. Pixels are squares, so it
    is their middles that are looked up."""
    place = (xp.arange(wanted, dtype=xp.float32) + 0.5) * (length / wanted) - 0.5
    place = xp.clip(place, 0, length - 1)
    low = xp.floor(place).astype(xp.int64)
    return low, xp.minimum(low + 1, length - 1), place - low


@per_item
def normalise(
    array: Any,
    out: Any,
    meta: dict[str, Any],
    *,
    xp: Any,
    mean: float | list[float] = 0.0,
    std: float | list[float] = 1.0,
    scale: float | None = None,
    channels_first: bool = False,
) -> None:
    """``(array * scale - mean) / std``. ``scale``: by default whole numbers become 0 to 1. ``mean`` and ``std``: a
    number, or one for each of the last axis. ``channels_first``: (height, width, channels) becomes (channels, height,
    width)."""
    if scale is None:
        scale = 1.0 / xp.iinfo(array.dtype).max if array.dtype.kind in "iu" else 1.0
    middle, width = xp.asarray(mean, xp.float32), xp.asarray(std, xp.float32)
    made = (array.astype(xp.float32) * xp.float32(scale) - middle) / width
    out[...] = xp.moveaxis(made, -1, 0) if channels_first else made


@per_item
def edges(array: Any, out: Any, meta: dict[str, Any], *, xp: Any, strength: float = 1.0) -> None:
    """How strong the edge is at each pixel: (height, width) or (height, width, 3) of uint8 -> (height, width) of uint8.
    Grey, then the magnitude of Sobel's gradient, in whole numbers: every device gives the same."""
    grey = array.astype(xp.int32)
    if grey.ndim == 3:
        grey = (77 * grey[..., 0] + 150 * grey[..., 1] + 29 * grey[..., 2] + 128) >> 8
    padded = xp.pad(grey, 1, mode="edge")
    down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    along = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    across = down[:, 2:] - down[:, :-2]
    upright = along[2:] - along[:-2]
    magnitude = xp.sqrt((across * across + upright * upright).astype(xp.float32))
    out[...] = xp.minimum(magnitude * xp.float32(strength), 255).astype(xp.uint8)
