"""Every error ipcsync raises: its stable ``code``, the fields it carries, and what to do about it.

Each class is an :class:`IpcSyncError`, so ``except ipcsync.IpcSyncError`` catches them all. Where Python already has a
word for the situation, the class is that too (``WaitTimeout`` is a ``TimeoutError``), so generic code keeps working.
Fields are keyword arguments, become attributes, and survive pickling: an error may cross a process boundary whole.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[IpcSyncError], message: str, fields: dict[str, Any]) -> IpcSyncError:
    return cls(message, **fields)


class IpcSyncError(Exception):
    """Base of all errors of this library. ``code`` is stable and is what goes over the wire."""

    code = "error"

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not real attributes: the fields. `fields` itself is missing while unpickling.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


# -- what the caller asked for


class InvalidArgument(IpcSyncError, ValueError):
    """An argument is outside what the call accepts; the message says what it takes."""

    code = "invalid_argument"


class InvalidState(IpcSyncError, RuntimeError):
    """The call does not fit what the object is now (a slot already released, a writer already closed)."""

    code = "invalid_state"


class AmbiguousStream(IpcSyncError, RuntimeError):
    """torch and CuPy are both loaded and their current streams differ: pass ``stream=`` or ``connect(streams=...)``."""

    code = "ambiguous_stream"


class CaptureUnsupported(IpcSyncError, RuntimeError):
    """The stream is being captured into a CUDA graph; cross-process record and wait cannot be replayed."""

    code = "capture_unsupported"


class WrongDevice(IpcSyncError, ValueError):
    """The stream belongs to another device than the event, channel or array."""

    code = "wrong_device"


class NotExportable(IpcSyncError, ValueError):
    """This memory cannot be shared with another process; the message says why and what can (``create_array``)."""

    code = "not_exportable"


class HandleInvalid(IpcSyncError, ValueError):
    """The bytes are no IPC handle that can be opened here (garbage, wrong length, exporter gone)."""

    code = "handle_invalid"


class MetaTooLarge(IpcSyncError, ValueError):
    """``meta`` does not fit the channel's ``meta_bytes``."""

    code = "meta_too_large"


class NameInUse(IpcSyncError):
    """The name exists; pass ``exist_ok=True`` with the same specification to open it."""

    code = "name_in_use"


class NotFound(IpcSyncError, LookupError, TimeoutError):
    """No such name by the deadline."""

    code = "not_found"


# -- waiting


class WaitTimeout(IpcSyncError, TimeoutError):
    """The deadline of a host wait passed; nothing was enqueued."""

    code = "wait_timeout"


class WouldBlock(IpcSyncError, BlockingIOError):
    """``block=False`` and the host would have to wait."""

    code = "would_block"


class EndOfStream(IpcSyncError, EOFError):
    """The channel's writer closed it and every item was read."""

    code = "end_of_stream"


# -- death and loss


class PeerDied(IpcSyncError):
    """The process that was to complete a round is dead (or its round depended on a dead one's).

    Fields: ``session`` (its name), ``pid``, ``round`` (the first round that will never be true), ``name`` (what was
    waited for).
    """

    code = "peer_died"


class PeerFailed(PeerDied):
    """The peer lives, but its work raised: a stream's call failed, or its writer was left by an exception."""

    code = "peer_failed"


class StaleHandle(IpcSyncError):
    """The object belongs to an ended incarnation; open the name again."""

    code = "stale_handle"


class ResourceLost(IpcSyncError):
    """The broker could not take this over after its restart; create it anew."""

    code = "resource_lost"


class DeviceLost(IpcSyncError):
    """This process's CUDA context is gone (an MPS peer was killed, or a kernel faulted): leave and start again."""

    code = "device_lost"


class StreamFailed(IpcSyncError, RuntimeError):
    """A call enqueued on a host stream raised; the cause is chained. The stream takes no more work."""

    code = "stream_failed"


class RecorderBusy(IpcSyncError):
    """Another session holds the pen of this event. Fields: ``session``, ``pid``."""

    code = "recorder_busy"


# -- the session and the broker


class SessionClosed(IpcSyncError):
    """The session was closed; connect again."""

    code = "session_closed"


class ForkedProcess(IpcSyncError, RuntimeError):
    """A child made by fork used what its parent opened: start children with the spawn method."""

    code = "forked_process"


class BrokerUnavailable(IpcSyncError, ConnectionError):
    """No broker answered by the deadline; attached work goes on, control calls do not."""

    code = "broker_unavailable"


class BrokerRunning(IpcSyncError):
    """A broker already serves this runtime directory. Fields: ``pid``."""

    code = "broker_running"


class ProtocolMismatch(IpcSyncError):
    """Client and broker (or ledger) speak no common version; both are named."""

    code = "protocol_mismatch"


class BadMessage(IpcSyncError, ValueError):
    """A message breaks the protocol's schema or limits."""

    code = "bad_message"


class PermissionDenied(IpcSyncError, PermissionError):
    """Another uid, or a directory or socket that is not ours."""

    code = "permission_denied"


class RuntimeDirectory(IpcSyncError, OSError):
    """The runtime directory cannot be used; the message says why and what can."""

    code = "runtime_directory"


class QuotaExceeded(IpcSyncError):
    """A limit of the broker; fields ``resource``, ``limit``."""

    code = "quota_exceeded"


class OutOfSpace(IpcSyncError, OSError):
    """The tmpfs is full. Fields: ``needed`` bytes, ``path``."""

    code = "out_of_space"


# -- devices


class DeviceUnavailable(IpcSyncError, RuntimeError):
    """No such device, or no CUDA on this machine; ``ipcsync doctor`` says what is missing."""

    code = "device_unavailable"


class DeviceNotVisible(DeviceUnavailable):
    """The device exists on this machine but CUDA_VISIBLE_DEVICES hides it from this process. Field: ``uuid``."""

    code = "device_not_visible"


class Unsupported(IpcSyncError, NotImplementedError):
    """This machine, driver or build cannot do it."""

    code = "unsupported"


class CudaError(IpcSyncError, RuntimeError):
    """CUDA answered an error that has no better name here. Fields: ``status``, ``call``."""

    code = "cuda_error"


# -- pipelines


class PipelineInvalid(IpcSyncError, ValueError):
    """pipeline.toml is wrong. Field ``problems``: a list of (line, key, message)."""

    code = "pipeline_invalid"


def _all(cls: type[IpcSyncError]) -> list[type[IpcSyncError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _all(child))]


BY_CODE: dict[str, type[IpcSyncError]] = {cls.code: cls for cls in _all(IpcSyncError)}
__all__ = sorted(cls.__name__ for cls in BY_CODE.values())


def from_wire(code: str, message: str, fields: dict[str, Any]) -> IpcSyncError:
    """The error a peer reported; an unknown code (a newer peer) becomes the base class, its code kept in the fields."""
    cls = BY_CODE.get(code)
    if cls is None:
        return IpcSyncError(message, **{**fields, "wire_code": code})
    return cls(message, **fields)
