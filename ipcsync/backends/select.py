"""The one place that chooses a backend."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ..errors import DeviceUnavailable

if TYPE_CHECKING:
    from ..device import Device
    from .base import Backend


def backend(device: Device | str) -> Backend:
    """The backend of a device, or of a device type. ``DeviceUnavailable`` says what is missing for cuda."""
    return _backend(device if isinstance(device, str) else device.type)


@cache
def _backend(kind: str) -> Backend:
    if kind == "cpu":
        from .host import HostBackend

        return HostBackend()
    from .cuda import CudaBackend

    return CudaBackend()


@cache
def has_cuda() -> bool:
    """Whether this process can use a CUDA device."""
    try:
        return backend("cuda").device_count() > 0
    except DeviceUnavailable:
        return False
