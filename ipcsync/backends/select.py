"""The one place that chooses a backend."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from ..errors import DeviceUnavailable, InvalidArgument

if TYPE_CHECKING:
    from ..device import Device
    from .base import Backend


_lock = threading.RLock()


def backend(device: Device | str) -> Backend:
    """The backend of a device, or of a device type ("cpu", "cuda"): one each for the whole process.

    ``DeviceUnavailable`` says what is missing for cuda, and that ``ipcsync doctor`` tells more.
    """
    kind = device if isinstance(device, str) else device.type
    try:
        return _made[kind]
    except KeyError:
        with _lock:
            return _made.get(kind) or _made.setdefault(kind, _make(kind))


_made: dict[str, Backend] = {}


def _make(kind: str) -> Backend:
    if kind == "cpu":
        from .host import HostBackend

        return HostBackend()
    if kind == "cuda":
        from .cuda import CudaBackend

        return CudaBackend()
    raise InvalidArgument(f'there is no backend {kind!r}: "cpu" and "cuda"')


@cache
def has_cuda() -> bool:
    """Whether this process can use a CUDA device."""
    try:
        return backend("cuda").device_count() > 0
    except DeviceUnavailable:
        return False
