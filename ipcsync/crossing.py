"""From the host's memory to a GPU: a host channel's slot that a CUDA stream copies from and then gives back.

The stream stores the reader's DONE word itself, so the host need not wait for the copy. Pinned buffers make the copy
asynchronous and as fast as the bus.
"""

from __future__ import annotations

from typing import Any

from .backends import select
from .backends.base import Backend, Memory, RawStream
from .shm import Region
from .stream import Stream


class Crossing:
    """What one reader of a host channel has registered with CUDA."""

    def __init__(self, control: Region) -> None:
        self._control = control
        self._registered: list[Region] = []

    @property
    def used(self) -> bool:
        """Whether a device may be writing the control file's words, which cannot wake a futex."""
        return bool(self._registered)

    def stream(self, stream: object) -> tuple[Backend, RawStream] | None:
        """(CUDA's backend, the raw stream) of a CUDA stream, ours or anybody's; None for what is the host's."""
        if isinstance(stream, Stream):
            if stream.device.type == "cpu":
                return None
            found: Any = (stream._raw, stream.device.index)
        elif not select.has_cuda() or (found := select.backend("cuda").foreign_stream(stream)) is None:
            return None
        self._register(self._control, found[1])
        return select.backend("cuda"), found[0]

    def pin(self, memory: Memory) -> None:
        """Registers the ring's buffers, so that copies from them are asynchronous."""
        self._register(memory.keep, select.backend("cuda").current_device())

    def _register(self, region: Region, device: int) -> None:
        if region not in self._registered:
            cuda = select.backend("cuda")
            with cuda.using(device):
                cuda.register(region)
            self._registered.append(region)

    def close(self) -> None:
        """Once no stream uses them any more."""
        for region in self._registered:
            select.backend("cuda").unregister(region)
        self._registered.clear()
