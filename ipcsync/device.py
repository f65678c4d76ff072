"""Devices: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, a ``Device``, a ``torch.device``, a ``cupy.cuda.Device``."""

from __future__ import annotations

import re
from dataclasses import dataclass

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

        return "cpu" if self.type == "cpu" else select.backend(self).uuid(self.index)


def as_device(device: object = None) -> Device:
    """The device that `device` means; None is the accelerator if there is one, else the CPU.

    Raises ``InvalidArgument`` for what is no device, ``DeviceUnavailable`` for one that is not there.
    """
    from .backends import select

    if isinstance(device, Device):
        return device
    if device is None:
        return Device("cuda", select.backend("cuda").current_device()) if select.has_cuda() else Device("cpu")
    if isinstance(device, int) and not isinstance(device, bool):
        kind, index = "cuda", device
    elif isinstance(device, str):
        found = _TEXT.fullmatch(device)
        if found is None:
            raise InvalidArgument(f'{device!r} is no device: "cpu", "cuda" or "cuda:N"')
        kind, index = found[1], None if found[2] is None else int(found[2])
    elif isinstance(getattr(device, "type", None), str):  # torch.device
        kind, index = device.type, device.index
    elif hasattr(device, "id"):  # cupy.cuda.Device
        kind, index = "cuda", device.id
    else:
        raise InvalidArgument(f'{device!r} is no device: "cpu", "cuda", "cuda:N", or a torch or CuPy device')
    if kind == "cpu":
        return Device("cpu")
    if kind != "cuda":
        raise InvalidArgument(f"devices of type {kind!r} are not supported: cpu and cuda are")
    backend = select.backend("cuda")
    if index is None:
        return Device("cuda", backend.current_device())
    if not 0 <= index < backend.device_count():
        raise DeviceUnavailable(
            f"there is no cuda:{index}: this process sees {backend.device_count()} (CUDA_VISIBLE_DEVICES?); "
            "`ipcsync doctor` lists them"
        )
    return Device("cuda", index)
