"""What a session does with something that the broker has just attached it to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from . import wire
from .errors import IpcSyncError

if TYPE_CHECKING:
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
