"""CUDA's events as the backend hands them around, and how many there can be."""

from __future__ import annotations

from typing import Any

from ..errors import QuotaExceeded

EVENT_LIMIT = 4096  # live interprocess events of one process: CUDA's own limit


def too_many() -> QuotaExceeded:
    return QuotaExceeded(
        f"this process has CUDA's {EVENT_LIMIT} interprocess events: let some go, or use "
        'create_event(via="timeline"), which has no CUDA event',
        resource="cuda-events",
        limit=EVENT_LIMIT,
    )


class CudaEvent:
    """A CUevent and what it is; ``int()`` is its address."""

    __slots__ = ("device", "handle", "interprocess", "opened")

    def __init__(self, handle: Any, device: int, *, interprocess: bool, opened: bool) -> None:
        self.handle, self.device, self.interprocess, self.opened = handle, device, interprocess, opened

    def __int__(self) -> int:
        return int(self.handle)

    @property
    def ptr(self) -> int:
        """Its address, by the name that CuPy's streams look for."""
        return int(self.handle)
