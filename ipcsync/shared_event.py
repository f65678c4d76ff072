"""Shared events: named, with rounds, across processes. DESIGN: a raw CUDA event knows no "not yet", rounds or death."""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from . import errors, wire
from .ledger import LAST_ROUND, Cell
from .opening import attached
from .session import check_name
from .stream import Stream, resolve_any
from .waiting import UNSET, Deadline, Timeout, wait_word

if TYPE_CHECKING:
    from .device import Device
    from .event import Event
    from .session import Session
    from .session_core import SessionCore
    from .timeline import Timeline


@dataclass(frozen=True)
class EventRef:
    """One round of one incarnation: what is passed through one's own RPC, as :meth:`to_bytes`, and waited for there."""

    namespace: str
    name: str
    incarnation: int
    round: int

    def to_bytes(self) -> bytes:
        """The reference as bytes, at most 262: for one's own RPC."""
        head = struct.pack("<4sQQBB", b"ipe1", self.incarnation, self.round, len(self.namespace), len(self.name))
        return head + self.namespace.encode() + self.name.encode()

    __bytes__ = to_bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> EventRef:
        """The reference in `data`; ``InvalidArgument`` if it is none."""
        try:
            magic, incarnation, round, n, m = struct.unpack_from("<4sQQBB", data)
            text = bytes(data)[22:]
            if magic != b"ipe1" or len(text) != n + m:
                raise ValueError
            return cls(text[:n].decode(), text[n:].decode(), incarnation, round)
        except (struct.error, ValueError, TypeError):
            raise errors.InvalidArgument("these bytes are no event reference: they come from event.ref(n)") from None


class SharedEvent:
    """An event of a session: made by ``create_event`` or ``open_event``.

    Rounds count from 1 and complete in order. One session at a time holds the pen and records; any may wait.
    """

    def __init__(self, session: Session, info: wire.EventInfo, device: Device) -> None:
        self.session, self.info, self.device = session, info, device
        self._timeline: Timeline = session.open_timeline(info)
        self._closed = False
        session.adopt(self)

    @property
    def name(self) -> str:
        """What it is called in its namespace."""
        return self.info.name

    # -- recording

    def record(self, stream: object = None, *, timeout: Timeout = UNSET) -> int:
        """Marks the next round behind the work enqueued on `stream` so far, and returns its number: 1, 2, 3, ...

        The first record of a session takes the pen (one call to the broker): ``RecorderBusy`` if another has it.
        """
        timeline = self._timeline
        if stream.__class__ is Stream and stream.device is self.device:
            raw = stream._raw
        else:
            raw = self.session.stream(stream, self.device)
        if not timeline._pen:
            self._check()
            timeline.take_pen(lambda: self._take(timeout))
        return timeline.record(raw)

    def _take(self, timeout: Timeout) -> None:
        deadline = self.session.deadline(timeout)
        self.session.request("pen", wire.Pen(self.info.incarnation), wire.PenReply, deadline)

    def release(self, *, timeout: Timeout = UNSET) -> None:
        """Lets the pen go once all this session issued is complete, for which the host waits."""
        self._check()
        deadline = self.session.deadline(timeout)
        back = wire.PenBack(self.info.incarnation)
        self._timeline.drop_pen(deadline, lambda: self._ask("pen_back", back, deadline))

    def _ask(self, op: str, body: Any, deadline: Deadline) -> None:
        self.session.request(op, body, wire.Empty, deadline)

    # -- waiting

    def wait(
        self, stream: object = None, *, round: int | None = None, timeout: Timeout = UNSET, block: bool = True
    ) -> None:
        """Makes `stream` wait for `round` (or a later one); without one, for the latest issued and at least the first.
        The stream may be of any device of the event's kind; without one, it is the current one.

        The host waits only until the round is issued, `timeout` seconds at most (``WaitTimeout``; nothing was
        enqueued), and not at all with ``block=False`` (``WouldBlock``). On the host's own thread the stream is the
        caller. Raises ``PeerDied`` when the round will never be true.
        """
        timeline = self._timeline
        if stream.__class__ is Stream and stream.device is self.device:
            raw = stream._raw
        else:
            raw = resolve_any(stream, self.device, streams=self.session.streams)
        n = round if round.__class__ is int and 0 < round <= LAST_ROUND else timeline.resolve(round)
        if self._closed or not timeline.wait_now(raw, n):
            self._check()
            timeline.wait(raw, n, self.session.deadline(timeout), block=block)

    def synchronize(self, *, round: int | None = None, timeout: Timeout = UNSET) -> None:
        """The host waits until `round` is complete and true: a commit point."""
        timeline = self._timeline
        n = timeline.resolve(round)
        if self._closed:
            self._check()
        if not timeline.complete(n):
            timeline.wait_host(n, self.session.deadline(timeout))

    async def synchronize_async(self, *, round: int | None = None, timeout: Timeout = UNSET) -> None:
        """`synchronize` for coroutines: the event loop goes on meanwhile, and cancelling it leaves nothing behind."""
        from .many import synchronize

        self._check()
        timeline = self._timeline
        await synchronize(timeline, timeline.resolve(round), self.session.deadline(timeout))

    def query(self, *, round: int | None = None) -> bool:
        """Whether `round` (or the latest issued) is complete; False when nothing was issued."""
        self._check()
        return self._timeline.query(round)

    @property
    def issued(self) -> int:
        """The last round submitted to its stream; 0 before the first."""
        return self._timeline.issued

    @property
    def completed(self) -> int:
        """The last round that is complete and true."""
        return self._timeline.completed

    def ref(self, round: int | None = None) -> EventRef:
        """A reference to a round, to be waited for elsewhere by ``session.wait(ref, stream)``."""
        info = self.info
        return EventRef(info.namespace, info.name, info.incarnation, self._timeline.resolve(round))

    def cuda_event(self, *, timeout: Timeout = UNSET) -> Event:
        """The CUDA event itself, as a Layer-1 ``Event``: ``wait(stream)`` takes torch's streams, ``ipc_handle()`` are
        the bytes for ``torch.cuda.Event.from_ipc_handle``, and ``cuda_event`` is its address for C. Returns after a
        round that the recorder recorded on it as well.

        A raw event knows no death: whoever waits on it when its recorder is killed hangs.
        """
        self._check()
        timeline = self._timeline
        if timeline.cuda_event is None:
            raise errors.InvalidState(
                f'{self.name!r} has no CUDA event: it is on the CPU, or was created with via="timeline"'
            )
        deadline = self.session.deadline(timeout)
        self._ask("mirror", wire.MirrorEvent(self.info.incarnation), deadline)
        wait_word(
            timeline.region,
            timeline.at + Cell.CUDA_ROUND,
            1,
            deadline,
            check=lambda: timeline.check(timeline.issued + 1),
            what=lambda: f"a round of {self.name!r} recorded on its CUDA event as well",
            polled=True,
        )
        return timeline.cuda_event

    # -- the end

    def close(self, *, timeout: Timeout = UNSET) -> None:
        """Drains what this session recorded, lets the pen go and closes the handle; the event lives on elsewhere."""
        if not self._closed:
            self._shutdown(self.session.deadline(timeout))

    def _shutdown(self, deadline: Deadline) -> None:
        self._closed = True
        timeline = self._timeline
        if not self.session.forget(self):
            return  # opened here more than once: the last one to close lets go
        try:
            if timeline.has_pen:
                back = wire.PenBack(self.info.incarnation)
                timeline.drop_pen(deadline, lambda: self._ask("pen_back", back, deadline))
        except (errors.PeerDied, errors.PeerFailed, errors.ResourceLost):
            pass  # condemned: nothing to drain
        self.session.detach(self.info.incarnation, timeline.quiet, deadline)
        timeline.cuda_event = None  # it goes when nobody else holds it either

    def _held(self) -> dict[str, Any]:
        return {
            "kind": "event",
            "name": self.info.name,
            "incarnation": self.info.incarnation,
            "cell": self.info.cell,
            "pen": self._timeline.has_pen,
        }

    def _check(self) -> None:
        self.session.check()
        if self._closed:
            raise errors.InvalidState(f"the handle of {self.name!r} was closed: open it again")

    def __enter__(self) -> SharedEvent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ipcsync.SharedEvent {self.name!r} on {self.device} issued={self.issued} completed={self.completed}>"


def create_event(
    session: Session,
    name: str,
    *,
    device: object,
    via: Literal["auto", "timeline", "cuda-event"],
    exist_ok: bool,
    lifetime: Literal["session", "broker"],
    timeout: Timeout,
) -> SharedEvent:
    from .device import as_device

    check_name(name)
    if via not in ("auto", "timeline", "cuda-event"):
        raise errors.InvalidArgument(f'via={via!r}: "auto", "timeline" or "cuda-event"')
    where = as_device(device)
    if via == "cuda-event":
        if where.type == "cpu":
            raise errors.InvalidArgument('via="cuda-event" needs a CUDA device; on the CPU use via="auto"')
        warnings.warn(
            f'{name!r} waits via="cuda-event": a stream that waits on it hangs for ever if its recorder is killed',
            RuntimeWarning,
            stacklevel=3,
        )
    body = wire.CreateEvent(name, where.uuid, via, exist_ok, lifetime)
    info = session.request("create_event", body, wire.EventInfo, session.deadline(timeout))
    return SharedEvent(session, info, where)


def open_event(session: Session, name: str, timeout: Timeout) -> SharedEvent:
    check_name(name)
    info = session.request("open_event", wire.Open("event", name), wire.EventInfo, session.deadline(timeout))
    with attached(session, info.incarnation):
        return SharedEvent(session, info, device_of(session, info.device))


def device_of(session: SessionCore, uuid: str) -> Device:
    from .device import the

    backend, index = session.backend(uuid)
    return the(backend.device_type, index)


def wait_ref(session: Session, ref: EventRef | bytes, stream: object, timeout: Timeout) -> None:
    if not isinstance(ref, EventRef):
        ref = EventRef.from_bytes(ref)
    if ref.namespace != session.namespace:
        raise errors.InvalidArgument(f"{ref} is of namespace {ref.namespace!r}, this session of {session.namespace!r}")
    event = next(
        (t for t in session._adopted.values() if isinstance(t, SharedEvent) and t.info.incarnation == ref.incarnation),
        None,
    ) or open_event(session, ref.name, timeout)
    if event.info.incarnation != ref.incarnation:
        raise errors.StaleHandle(f"{ref.name!r} was created anew since {ref} was made", name=ref.name)
    event.wait(stream, round=ref.round, timeout=timeout)
