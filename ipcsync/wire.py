"""Every message: its schema, its limits, and the protocol's version. docs/protocol.md is the normative text.

On the wire a message is one ZeroMQ frame of msgpack. It is unpacked with limits (no extension types, no huge
lengths), then converted against the typed structs below; what does not fit is a ``BadMessage``, never another error.

==============  ==========================================================================================
request         client DEALER -> broker ROUTER: ``{v, id, op, left, body}``
reply           broker -> client: ``{v, id, boot, ok, body}`` or ``{v, id, boot, ok: false, error}``
announcement    broker PUB: frames ``[namespace, {v, boot, seq, kind, body}]``
==============  ==========================================================================================
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec
from msgspec import Meta, Struct

from . import errors

PROTOCOL_MIN, PROTOCOL_MAX = 1, 1
MAX_MESSAGE = 1 << 20  # bytes of one frame; larger ones are refused by the socket itself (ZMQ_MAXMSGSIZE)
MAX_DEPTH_ITEMS = 65536  # entries of one array or map

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,120}$")]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Handle = Annotated[bytes, Meta(max_length=4096)]
Kind = Literal["event", "channel", "array"]
Via = Literal["auto", "timeline", "cuda-event"]
Device = Annotated[str, Meta(max_length=64)]  # "cpu", or a GPU's UUID: an ordinal means nothing to a peer


# -- the envelopes


class Request(Struct):
    v: Annotated[int, Meta(ge=1, le=1 << 16)]
    id: Count
    op: Annotated[str, Meta(max_length=40)]
    body: dict[str, Any]
    left: Annotated[float, Meta(ge=0)] | None = None  # seconds until the caller gives up; None: it does not


class Failure(Struct):
    code: Annotated[str, Meta(max_length=40)]
    message: Text
    fields: dict[str, Any] = {}


class Reply(Struct):
    v: int
    id: Count
    boot: bytes
    ok: bool
    body: dict[str, Any] = {}
    error: Failure | None = None


class Announcement(Struct):
    """``seq`` counts every announcement of this boot, over all namespaces: a gap says that one was missed."""

    v: int
    boot: bytes
    seq: Count
    kind: Literal["created", "removed", "condemned", "session", "tick", "stopping"]
    body: dict[str, Any] = {}


# -- what is described


class FieldSpec(Struct, frozen=True):
    """One field of a slot or array: where it lies in a buffer and its greatest extent."""

    name: Name
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, lt=1 << 48)], ...], Meta(max_length=16)]
    dtype: Annotated[str, Meta(max_length=32)]
    offset: Count = 0
    strides: tuple[int, ...] | None = None  # None: C order
    region: Count = 0  # which of the object's memory handles it lies in (shared arrays may have many)


class MemoryInfo(Struct, frozen=True):
    handle: Handle
    nbytes: Count
    device: Device = "cpu"


class EventInfo(Struct):
    name: Name
    namespace: Name
    incarnation: Count
    cell: Count
    device: Device
    via: Via  # as decided, or "auto": a CUDA event exists, waiting goes by the timeline where a probe says it works
    handle: Handle = b""  # the 64 bytes of the interprocess CUDA event, empty where there is none


class ChannelSpec(Struct, frozen=True):
    fields: Annotated[tuple[FieldSpec, ...], Meta(min_length=1, max_length=64)]
    stride: Annotated[int, Meta(ge=1, lt=1 << 48)]  # bytes of one buffer
    depth: Annotated[int, Meta(ge=2, le=4096)]
    max_readers: Annotated[int, Meta(ge=1, le=256)] = 16
    meta_bytes: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096
    memory: Literal["broker", "session"] = "broker"
    lifetime: Literal["session", "broker"] = "session"
    redeliver: bool = True
    single: bool = False  # made with shape=/dtype= rather than fields=: slot.array is its one field


class ChannelInfo(Struct):
    event: EventInfo  # its timeline: round n is item n
    spec: ChannelSpec
    control: Name  # file of the runtime directory: ring.py's layout
    memory: MemoryInfo


class ArraySpec(Struct, frozen=True):
    fields: Annotated[tuple[FieldSpec, ...], Meta(min_length=1, max_length=65536)]
    memory: Literal["broker", "session"] = "broker"
    lifetime: Literal["session", "broker"] = "session"
    max_readers: Annotated[int, Meta(ge=1, le=256)] = 16
    single: bool = False


class ArrayInfo(Struct):
    event: EventInfo
    spec: ArraySpec
    control: Name
    memory: tuple[MemoryInfo, ...]


# -- requests: the body of each op, and the body of its reply


class Hello(Struct):
    """The first request of a session. Everything else is refused until it was answered."""

    protocol_min: Count
    protocol_max: Count
    layout: Count
    version: Text  # of the ipcsync package, for the message when nothing fits
    name: Annotated[str, Meta(max_length=64)]
    namespace: Name
    pid: Count
    start: Count  # /proc/<pid>/stat field 22
    boot_id: Text
    pid_namespace: Count
    uid: Count
    session: Count = 0  # after a reconnect: the number it had
    lock: Annotated[str, Meta(pattern=r"^(life-[0-9a-f]{32})?$")] = (
        ""  # file that the process holds locked, see life.py
    )
    held: list[dict[str, Any]] = []  # after a reconnect: what it has open (kind, name, incarnation, cell, pen)


class Welcome(Struct):
    protocol: int
    session: Count
    block: Count
    boot: bytes
    seq: Count
    ledger: Text  # file of the runtime directory
    announce: Text  # endpoint of PUB
    lease: float  # seconds of silence after which a session is taken for stopped
    version: Text = ""
    resumed: bool = False  # the session's number and block are those it had


class Bye(Struct):
    pass


class Beat(Struct):
    progress: Count = 0


class CreateEvent(Struct):
    name: Name
    device: Device
    via: Via = "auto"
    exist_ok: bool = False
    lifetime: Literal["session", "broker"] = "session"


class Open(Struct):
    """Parked by the broker until the name appears; ``not_found`` when ``left`` has passed."""

    kind: Kind
    name: Name


class Detach(Struct):
    """The session holds this incarnation no longer, and none of its device work touches it."""

    incarnation: Count


class Pen(Struct):
    incarnation: Count


class PenReply(Struct):
    issued: Count


class PenBack(Struct):
    incarnation: Count


class MirrorEvent(Struct):
    """Somebody wants the CUDA event itself: from its next record on the recorder records it too."""

    incarnation: Count


class CreateChannel(Struct):
    name: Name
    device: Device
    spec: ChannelSpec
    exist_ok: bool = False
    memory: MemoryInfo | None = None  # memory="session": the creator's


class JoinWriter(Struct):
    incarnation: Count


class WriterReply(Struct):
    """``event``: the timeline of this epoch (a new cell after a condemned one). ``base``: items start at base + 1."""

    event: EventInfo
    epoch: Count
    base: Count


class LeaveWriter(Struct):
    """The pen goes back. ``end``: the stream has ended after its last issued item, for good."""

    incarnation: Count
    end: Literal["", "closed", "failed"] = ""


class JoinReader(Struct):
    incarnation: Count
    policy: Literal["block", "latest"] = "block"
    start: Literal["next", "oldest"] = "next"
    group: Name | None = None


class ReaderReply(Struct):
    cell: Count  # which reader cell of the control file
    start: Count  # the first item it must account for


class LeaveReader(Struct):
    """All its slots are released and its device work on them is done."""

    incarnation: Count
    cell: Count


class CreateArray(Struct):
    """``memory`` is given by ``share`` (the caller's own) and empty when the broker is to allocate."""

    name: Name
    device: Device
    spec: ArraySpec
    exist_ok: bool = False
    memory: tuple[MemoryInfo, ...] = ()


class Unlink(Struct):
    name: Name


class Condemn(Struct):
    """A session condemns what it records (its stream raised), or an operator what he names."""

    incarnation: Count = 0
    name: Name | None = None
    reason: Text = ""


class Suspect(Struct):
    """A waiter saw the life word of this block's owner go."""

    block: Count


class Snapshot(Struct):
    """All names of the namespace, as of announcement ``seq``. ``after``: paging, the last name of the page before."""

    after: str = ""


class SnapshotReply(Struct):
    seq: Count
    created: list[dict[str, Any]]  # bodies of "created" announcements
    more: bool = False


class Status(Struct):
    pass


class Empty(Struct):
    pass


#: op -> (body, reply). The reply of `status` is free-form: `ipcsync status --json` prints it.
OPS: dict[str, tuple[type[Struct], type[Struct] | None]] = {
    "hello": (Hello, Welcome),
    "bye": (Bye, Empty),
    "beat": (Beat, Empty),
    "create_event": (CreateEvent, EventInfo),
    "open_event": (Open, EventInfo),
    "create_channel": (CreateChannel, ChannelInfo),
    "open_channel": (Open, ChannelInfo),
    "create_array": (CreateArray, ArrayInfo),
    "open_array": (Open, ArrayInfo),
    "detach": (Detach, Empty),
    "pen": (Pen, PenReply),
    "pen_back": (PenBack, Empty),
    "mirror": (MirrorEvent, Empty),
    "join_writer": (JoinWriter, WriterReply),
    "leave_writer": (LeaveWriter, Empty),
    "join_reader": (JoinReader, ReaderReply),
    "leave_reader": (LeaveReader, Empty),
    "unlink": (Unlink, Empty),
    "condemn": (Condemn, Empty),
    "suspect": (Suspect, Empty),
    "snapshot": (Snapshot, SnapshotReply),
    "status": (Status, None),
}

S = TypeVar("S")


def encode(message: Struct) -> bytes:
    """One frame of msgpack; structs become maps, tuples arrays."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode(frame: bytes | memoryview, kind: type[S]) -> S:
    """The typed message in `frame`; ``BadMessage`` says what is wrong with it."""
    if len(frame) > MAX_MESSAGE:
        raise errors.BadMessage(f"a message of {len(frame)} bytes: at most {MAX_MESSAGE} are read")
    try:
        value = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            ext_hook=_no_ext,
            max_str_len=65536,
            max_bin_len=65536,
            max_array_len=MAX_DEPTH_ITEMS,
            max_map_len=MAX_DEPTH_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise errors.BadMessage(f"not a msgpack message: {error or type(error).__name__}") from None
    return convert(value, kind)


def convert(value: Any, kind: type[S]) -> S:
    """`value`, already unpacked, against a schema."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise errors.BadMessage(f"{getattr(kind, '__name__', kind)}: {error}") from None


def _no_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not part of the protocol")


def failure(error: errors.IpcSyncError) -> Failure:
    """An error as it goes over the wire: code, message, and those fields that msgpack knows."""
    plain = {k: v for k, v in error.fields.items() if isinstance(v, str | int | float | bool | bytes | type(None))}
    return Failure(error.code, error.message[:4096], plain)


def raise_failure(reply: Failure) -> None:
    raise errors.from_wire(reply.code, reply.message, reply.fields)
