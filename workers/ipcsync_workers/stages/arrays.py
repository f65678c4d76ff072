"""NumPy's files: ``.npy`` for a channel of one field, ``.npz`` for one with several (an array a field, by its name).

::

    [stages.read]
    call = "ipcsync_workers.stages.arrays:read"
    outputs = ["samples"]
    params = { folder = "samples" }
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ipcsync.errors import InvalidArgument

from ..stage import Stage
from ._files import listed, shown, target, whole


def read(stage: Stage) -> None:
    """Every file of ``folder``. An array smaller than the channel's field makes an item of its own size; one that is
    larger, or of another dtype, is an error. The meta has its ``name``."""
    for path in listed(stage, (".npy", ".npz"))[stage.resumed_at :]:
        with stage.output.slot(meta={"name": shown(path.stem)}) as slot:
            for name, array in _load(path, list(slot)).items():
                room = slot[name]
                if array.dtype != room.dtype or array.ndim != room.ndim:
                    found, wanted = f"{array.ndim} axes of {array.dtype}", f"{room.ndim} of {room.dtype}"
                    raise InvalidArgument(
                        f"{path.name} has {found}, the channel {wanted}: make it so, or give the channel another shape "
                        "or dtype"
                    )
                if array.shape != room.shape:
                    slot.resize(name, array.shape)
                stage.put(slot[name], array)


def _load(path: Path, names: list[str]) -> dict[str, Any]:
    """The file's arrays, by the names of the channel's fields."""
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        if len(names) != 1:
            raise InvalidArgument(f"{path.name} is one array, and the channel has {', '.join(names)}: use .npz files")
        return {names[0]: loaded}
    with loaded:
        if len(names) == len(loaded.files) == 1:
            return {names[0]: loaded[loaded.files[0]]}
        for name in names:
            if name not in loaded:
                raise InvalidArgument(f"{path.name} has no array {name!r}; it has {', '.join(loaded.files)}")
        return {name: loaded[name] for name in names}


def write(stage: Stage) -> None:
    """One file an item, in ``folder``, named by the ``name`` in its meta. Each appears whole or not at all."""
    for slot in stage.input.slots():
        fields = {name: stage.to_host(slot[name]) for name in slot}
        single = len(fields) == 1
        with whole(target(stage, slot, ".npy" if single else ".npz")) as path:
            if single:
                np.save(path, next(iter(fields.values())), allow_pickle=False)
            else:
                np.savez(path, **fields)
        stage.count("written")
