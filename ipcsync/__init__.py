"""Cross-process GPU synchronisation on one machine.

``import ipcsync`` loads neither numpy, zmq, cupy nor torch: each name below brings its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import *  # noqa: F403  (every error is importable from here)

__version__ = "0.1.0"

_HOME = {
    "Device": "device",
    "Stream": "stream",
    "current_stream": "stream",
    "Event": "event",
    "connect": "session",
    "Session": "session",
    "EventRef": "shared_event",
    "SharedEvent": "shared_event",
    "Field": "fields",
    "Channel": "channel",
    "Reader": "channel_reader",
    "Writer": "channel_writer",
    "Slot": "slot",
    "SharedArray": "shared_array",
}

if TYPE_CHECKING:
    from .channel import Channel as Channel
    from .device import Device as Device
    from .event import Event as Event
    from .fields import Field as Field
    from .session import Session as Session
    from .session import connect as connect
    from .shared_array import SharedArray as SharedArray
    from .shared_event import EventRef as EventRef
    from .shared_event import SharedEvent as SharedEvent
    from .stream import Stream as Stream
    from .stream import current_stream as current_stream


def __getattr__(name: str) -> Any:
    if name == "torch":  # the submodule; importing it loads torch
        return import_module(".torch", __name__)
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [*errors.__all__, *_HOME, "__version__"]
