"""Slots: one turn with one buffer of a channel, the writer's and the reader's; and the map that goes with an item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from .epochs import previous
from .errors import InvalidArgument, InvalidState, MetaTooLarge, PeerDied
from .fields import shape_of
from .waiting import UNSET, Timeout

if TYPE_CHECKING:
    from .backends.base import Backend, RawStream
    from .channel_reader import Reader
    from .channel_writer import Writer

_encode = msgspec.msgpack.Encoder().encode


class Slot:
    """One turn with shared memory. ``slot.array`` is its one field, ``slot["ids"]`` a field by its name.

    The arrays are numpy's or CuPy's, over the memory itself; they must not be used once the turn has ended.
    """

    __slots__ = ("_arrays", "_raw", "_using")

    def __init__(self, raw: RawStream) -> None:
        self._arrays: dict[str, Any] | None = None  # None when it is not our turn
        self._raw = raw
        self._using: AbstractContextManager[None] | None = None

    def _make_current(self, backend: Backend) -> None:
        self._using = current(backend, self._raw)
        self._using.__enter__()

    def _leave_current(self) -> None:
        using, self._using = self._using, None
        assert using is not None
        using.__exit__(None, None, None)

    def _mine(self) -> dict[str, Any]:
        if self._arrays is None:
            raise InvalidState("the turn is not now: use the arrays inside the block, and before release()")
        return self._arrays

    @property
    def array(self) -> Any:
        """The slot's one field (numpy on the host, CuPy on a GPU)."""
        arrays = self._mine()
        if len(arrays) != 1:
            raise InvalidState(f"there are fields {', '.join(arrays)}: use slot[name]")
        return next(iter(arrays.values()))

    def __getitem__(self, name: str) -> Any:
        return self._mine()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._mine()

    def __iter__(self) -> Iterator[str]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())

    def keys(self) -> list[str]:
        """The names of its fields."""
        return list(self._mine())


class WriteSlot(Slot):
    """A free buffer to fill: ``with writer.slot(stream) as slot: slot.array[...] = image``. What it held is undefined.

    ``meta`` is a dict that goes with the item: set it until the block ends. ``number`` is the item's, final once the
    block has ended; None after ``discard()``.
    """

    __slots__ = ("_buffer", "_extents", "_writer", "epoch", "meta", "number")

    def __init__(self, writer: Writer, raw: RawStream, meta: Mapping[str, Any] | None, timeout: Timeout) -> None:
        self._arrays, self._raw, self._using = None, raw, None
        self._writer, self._buffer = writer, -1
        self.epoch = writer.epoch
        self._extents: dict[str, tuple[int, ...]] | Timeout = timeout  # the timeout, until the turn begins
        self.meta: dict[str, Any] = {} if meta is None else dict(meta)
        self.number: int | None = None

    def resize(self, *what: Any) -> None:
        """``resize(name, shape)``, or ``resize(shape)`` of the one field: this item's extent, at most the field's.

        An axis may be 0. ``slot.array`` and ``slot[name]`` are the smaller arrays from here on, here and at readers.
        """
        arrays = self._mine()
        if len(what) == 1 and len(arrays) == 1:
            what = (next(iter(arrays)), what[0])
        if len(what) != 2 or what[0] not in arrays:
            raise InvalidArgument(f"resize takes a field's name ({', '.join(arrays)}) and a shape")
        name, shape = what[0], shape_of(what[1])
        greatest = self._writer.channel.fields[name].shape
        if len(shape) != len(greatest) or any(n > most for n, most in zip(shape, greatest, strict=True)):
            raise InvalidArgument(f"{name!r} cannot be {shape}: the channel has room for {greatest}")
        assert isinstance(self._extents, dict)
        self._extents[name] = shape
        whole = self._writer._views[self._buffer][name]
        self._arrays = {**arrays, name: whole[tuple(slice(n) for n in shape)]}

    def discard(self) -> None:
        """Publishes nothing: the slot's turn is over now."""
        self._mine()
        self._writer._put_back(self)

    def confirm(self, timeout: Timeout = UNSET) -> None:
        """After the block: the host waits until the item is complete; ``PeerDied`` if what it hangs on was not."""
        if self.number is None or self._arrays is not None:
            raise InvalidState("nothing was published yet: confirm() after the slot's block")
        writer = self._writer
        writer._timeline.wait_host(self.number, writer.session.deadline(timeout))

    def __enter__(self) -> WriteSlot:
        writer = self._writer
        writer._begin(self)
        if writer._backend.device_writes:
            self._make_current(writer._backend)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._using is not None:
            self._leave_current()
        if self._arrays is None:
            return  # discarded
        if kind is not None:
            self._writer._put_back(self)
        else:
            self._writer._publish(self)


class ReadSlot(Slot):
    """An item and the buffer it lies in, ours until the turn ends. Host arrays are read-only.

    ``number`` (1, 2, 3, ... in the writer's order), ``epoch`` (which writer), ``published`` (when, on the clock of
    ``time.monotonic_ns``), ``skipped`` (items that a ``latest`` reader missed before this one), ``meta`` (the map).
    """

    __slots__ = (
        *("_buffer", "_meta", "_raw_meta", "_reader", "_timeline", "epoch", "number", "published", "skipped"),
        "__weakref__",
    )

    def __init__(self, reader: Reader, raw: RawStream, number: int, epoch: int, skipped: int) -> None:
        self._arrays, self._raw, self._using = None, raw, None
        self._reader, self._buffer, self.epoch = reader, -1, epoch
        self._timeline = reader._epochs.timeline
        self.number = number
        self.published = 0  # when the writer published it: time.monotonic_ns(), the same clock in every process
        self.skipped = skipped
        self._meta: dict[str, Any] | None = None
        self._raw_meta = b""

    @property
    def meta(self) -> dict[str, Any]:
        """What the writer said of the item; stays readable after the turn."""
        if self._meta is None:
            self._meta = decode_meta(self._raw_meta) if self._raw_meta else {}
        return self._meta

    @property
    def previous(self) -> int:
        """The number of the item before this one, 0 for the first. Less than ``number - 1`` where a writer died in
        between: what it had begun and not completed left its numbers unused."""
        return previous(self._reader.channel.control, self.epoch, self.number)

    def confirm(self, timeout: Timeout = UNSET) -> None:
        """The host waits until the item is complete; ``PeerDied`` if it will never be. A commit point: what was read of
        it after this, and computed behind this, comes from finished work."""
        try:
            self._timeline.wait_host(self.number, self._reader.session.deadline(timeout))
        except PeerDied:
            self._reader._told(self)
            raise

    def release(self, stream: Any = None) -> None:
        """Ends the turn, on `stream` (default: the one it was taken on): once that gets there the buffer may be
        written again. Idempotent; in any order. A host channel's slot may be released on a CUDA stream, behind its copy
        to the device."""
        if self._arrays is not None:
            self._reader._place.release(self, stream)

    def __enter__(self) -> ReadSlot:
        backend = self._reader._backend
        if backend.device_writes:
            self._make_current(backend)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._using is not None:
            self._leave_current()
        if self._arrays is not None:
            self._reader._place.release(self, None)
        if kind is None:
            self._reader._settle()


def current(backend: Backend, raw: RawStream) -> AbstractContextManager[None]:
    """CuPy's current stream is the turn's for a block, so that what the block computes is in order with the turn."""
    return backend.using_stream(raw, backend.stream_device(raw)) if backend.device_writes else nullcontext()


def encode_meta(meta: dict[str, Any], room: int, name: str) -> bytes:
    """`meta` as msgpack, empty for an empty map; ``MetaTooLarge`` when it needs more than `room` bytes."""
    if not meta:
        return b""
    if not isinstance(meta, dict):
        raise InvalidArgument(f"meta is a dict, not {type(meta).__name__}")
    try:
        raw = _encode(meta)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"meta holds what msgpack cannot say ({error}): use plain values") from None
    if len(raw) > room:
        raise MetaTooLarge(
            f"meta of {len(raw)} bytes in {name!r}, which has room for {room}: create the channel with a larger "
            "meta_bytes=, or give large data a field",
            size=len(raw),
            limit=room,
        )
    return raw


def decode_meta(raw: bytes) -> dict[str, Any]:
    """The map a writer stored."""
    found: dict[str, Any] = msgspec.msgpack.decode(raw)
    return found
