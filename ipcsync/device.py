"""Devices: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, a ``Device``, a ``torch.device``, a ``cupy.cuda.Device``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from .errors import DeviceUnavailable, InvalidArgument

_TEXT = re.compile(r"(cpu|cuda)(?::(\d{1,4}))?")


@dataclass(frozen=True)
class Device:
    """A device of this process: ``type`` is "cuda" or "cpu", ``index`` its ordinal here (0 for the CPU)."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return "cpu" if self.type == "cpu" else f"{self.type}:{self.index}"

    @property
    def uuid(self) -> str:
        """A name that means the same in every process: "cpu", or the GPU's UUID."""
        from .backends import select

        return select.backend(self).uuid(self.index)


@cache
def the(kind: str, index: int) -> Device:
    """The one object for each, so that `is` mostly tells, which is quicker than `==`."""
    return Device(kind, index)


CPU = the("cpu", 0)


def parse(device: object = None) -> tuple[str, int | None]:
    """("cpu" | "cuda", ordinal or None where `device` names none); a device of None is what there is. Not checked
    for being there; ``InvalidArgument`` for what is no device."""
    found: Any = device
    kind, index = None, None
    if device is None:
        from .backends import select

        return ("cuda", None) if select.has_cuda() else ("cpu", 0)
    if isinstance(device, str):
        text = _TEXT.fullmatch(device)
        if text is not None:
            kind, index = text[1], None if text[2] is None else int(text[2])
    elif isinstance(device, int) and not isinstance(device, bool):
        kind, index = "cuda", device
    elif isinstance(getattr(device, "type", None), str):  # ours, and torch.device
        kind, index = found.type, found.index
    elif isinstance(getattr(device, "id", None), int):  # cupy.cuda.Device
        kind, index = "cuda", found.id
    if kind == "cpu":
        return "cpu", 0
    if kind != "cuda" or not (index is None or isinstance(index, int)):
        raise InvalidArgument(f'{device!r} is no device: "cpu", "cuda", "cuda:N", or a torch or CuPy device of these')
    return kind, index


def as_device(device: object = None) -> Device:
    """The device that `device` means; None is the accelerator if there is one, else the CPU.

    Raises ``InvalidArgument`` for what is no device, ``DeviceUnavailable`` for one that is not there.
    """
    kind, index = parse(device)
    if kind == "cpu":
        return CPU
    from .backends import select

    backend = select.backend(kind)
    if index is None:
        index = backend.current_device()
    if not 0 <= index < backend.device_count():
        raise DeviceUnavailable(
            f"there is no {kind}:{index}: this process sees {backend.device_count()} (CUDA_VISIBLE_DEVICES?); "
            "`ipcsync doctor` lists them"
        )
    return the(kind, index)
