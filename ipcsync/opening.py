"""What a session does with something that the broker has just attached it to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from . import wire
from .errors import HandleInvalid, IpcSyncError, ResourceLost

if TYPE_CHECKING:
    from .backends.base import Backend, Memory
    from .session import Session


@contextmanager
def attached(session: Session, incarnation: int) -> Iterator[None]:
    """For opening it: what cannot be opened here (it is on a GPU that this process does not see, say) is given back, so
    that it does not stay for as long as this session."""
    try:
        yield
    except BaseException:
        if not session._handles[incarnation]:
            with suppress(IpcSyncError):
                session.request("detach", wire.Detach(incarnation), wire.Empty, session.deadline())
        raise


def memory(
    session: Session, backend: Backend, index: int, info: wire.MemoryInfo, name: str, *, writable: bool
) -> Memory:
    """Maps the memory of the channel or array `name`; ``ResourceLost`` if it went with the process that made it."""
    try:
        return backend.open_memory(index, backend.located(info.handle, session.runtime), info.nbytes, writable=writable)
    except (FileNotFoundError, HandleInvalid) as error:
        raise ResourceLost(
            f'the memory of {name!r} went with the process that made it (its creator\'s, with memory="session", else a '
            f"broker's that died), though whoever has it mapped may go on: create {name!r} anew ({error})"
        ) from None
