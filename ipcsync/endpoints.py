"""What ``connect(endpoint)`` names: a runtime directory, or a broker at ``tcp://`` on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from . import errors, runtime

if TYPE_CHECKING:
    from .keys import Line


def start_broker_in(directory: Path) -> None:
    """Starts a broker if none runs; ``PermissionDenied`` where that is another uid's to do."""
    if runtime.broker_pid(directory) is None:
        from importlib import import_module

        try:
            import_module("ipcsync_broker.launch").start(directory, linger=True)
        except errors.BrokerRunning:
            pass  # somebody else was faster


def line_of(endpoint: str | os.PathLike[str] | None, *, start_broker: bool) -> Line | None:
    """The keys for a ``tcp://`` endpoint; None for the others."""
    if endpoint is None or not os.fspath(endpoint).startswith("tcp://"):
        return None
    if start_broker:
        raise errors.InvalidArgument("a broker at tcp:// is not started by a client: `ipcsync broker --tcp ENDPOINT`")
    from .keys import line

    return line(os.fspath(endpoint))


def shared_directory(line: Line) -> Path:
    """The runtime directory, which a client over tcp has in common with the broker: its memory is there."""
    try:
        return runtime.directory(create=False)
    except errors.BrokerUnavailable as error:
        raise elsewhere(line, str(error.fields.get("path"))) from None


def elsewhere(line: Line, directory: object) -> errors.Unsupported:
    return errors.Unsupported(
        f"{line.endpoint}: the broker's memory is not in {directory}. A session over tcp runs on the broker's machine "
        "and shares its /dev/shm: set IPCSYNC_RUNTIME_DIR to the broker's runtime directory"
    )


def directory_of(endpoint: str | os.PathLike[str] | None, *, create: bool) -> Path:
    if endpoint is None:
        return runtime.directory(create=create)
    text = os.fspath(endpoint)
    if text.startswith("ipc://"):
        text = os.path.dirname(text.removeprefix("ipc://"))
    return runtime.directory(Path(text), create=create)
