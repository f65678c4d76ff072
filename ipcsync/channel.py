"""Channels: a ring of equal buffers, one writer, many readers, no copies. ``turns.py`` says when a buffer is free.

Item n is round n of the channel's event: the reader's stream waits for it on the device, and a writer's death condemns
it, exactly as for any shared event.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from . import opening
from .backends import select
from .backends.base import Backend, Memory
from .device import as_device, the
from .errors import InvalidArgument, InvalidState, IpcSyncError, SessionClosed
from .fields import Field, fields_of, layout
from .ledger import FOREVER, Cell
from .ring import Control, Head
from .ring import Reader as Words
from .waiting import UNSET, Deadline, Timeout
from .wire import (
    ChannelInfo,
    ChannelSpec,
    CreateChannel,
    Empty,
    JoinReader,
    JoinWriter,
    LeaveReader,
    LeaveWriter,
    MemoryInfo,
    Open,
    ReaderReply,
    WriterReply,
)

if TYPE_CHECKING:
    from .channel_place import Place, WriterPlace
    from .channel_reader import Reader
    from .channel_writer import Writer
    from .session import Session


#: memory="session": others may read it for as long as this process lives, whatever was closed here.
_kept: list[Memory] = []


class Views:
    """The arrays over a ring's memory, made once a buffer: a turn makes none unless its item is smaller."""

    def __init__(self, backend: Backend, memory: Memory, spec: ChannelSpec) -> None:
        self._backend, self.memory, self._spec = backend, memory, spec
        self._anchored, self.anchor = backend.anchored(memory)
        self._made: list[dict[str, Any] | None] = [None] * spec.depth

    def __getitem__(self, buffer: int) -> dict[str, Any]:
        made = self._made[buffer]
        if made is None:
            made = self._made[buffer] = {
                f.name: self._backend.array(self._anchored, buffer * self._spec.stride + f.offset, f.shape, f.dtype)
                for f in self._spec.fields
            }
        return made


class Channel:
    """A named ring of buffers. Made by ``session.create_channel`` and ``session.open_channel``.

    ``name``, ``depth`` (buffers), ``fields`` (name to :class:`Field`), ``device``, ``meta_bytes``, ``max_readers``.
    """

    def __init__(self, session: Session, info: ChannelInfo) -> None:
        self.session, self.info, self.spec = session, info, info.spec
        self.name = info.event.name
        self.incarnation = info.event.incarnation
        self.depth, self.max_readers, self.meta_bytes = info.spec.depth, info.spec.max_readers, info.spec.meta_bytes
        self.fields = {f.name: Field(f.shape, f.dtype) for f in info.spec.fields}
        self.backend, self.index = session.backend(info.event.device)
        self.device = the(self.backend.device_type, self.index)
        self.control = Control(session.map(info.control))
        with self.backend.using(self.index):
            self.backend.register(self.control.region)
        self._writer: WriterPlace | None = None  # the last one taken here
        self.abandoned: tuple[int, int] | None = None  # (epoch, last item) of a writer that nobody has any more
        self._memory: dict[bool, Memory] = {}
        self._users: set[Place] = set()
        self._lock = threading.Lock()
        self._closed = False
        session.adopt(self)

    def __repr__(self) -> str:
        return f"<ipcsync.Channel {self.name!r} depth {self.depth} on {self.device}>"

    def writer(self, *, timeout: Timeout = UNSET) -> Writer:
        """Becomes the channel's one writer. ``RecorderBusy`` names who is; ``EndOfStream`` when it was ended.

        Leave it by ``with`` (or ``close()``): that ends the stream; ``detach()`` leaves without ending it. One that is
        collected without either has said nothing of an end: another may write on (and a ``ResourceWarning`` tells).
        """
        from .channel_place import WriterPlace
        from .channel_writer import Writer

        self._check()
        self.views(writable=True)  # first: who cannot have the memory must not be the writer
        request = JoinWriter(self.incarnation)
        reply = self.session.request("join_writer", request, WriterReply, self.session.deadline(timeout))
        try:
            place = WriterPlace(self, reply)
            writer = Writer(place)
        except BaseException:
            self.session.link.post("leave_writer", LeaveWriter(self.incarnation, ""))
            raise
        self._writer, self.abandoned = place, None
        self._users.add(place)
        return writer

    def reader(
        self,
        policy: Literal["block", "latest"] = "block",
        start: Literal["next", "oldest"] = "next",
        group: str | None = None,
        on_writer_death: Literal["raise", "wait"] = "raise",
        *,
        pin: bool = False,
        timeout: Timeout = UNSET,
    ) -> Reader:
        """Attaches a reader: no item from its start on is overwritten before it is done with it.

        ``policy="latest"``: always the newest item; the writer does not wait for it, and what it was too slow for is
        counted (``slot.skipped``). ``start="oldest"``: from the oldest item that is still whole. ``on_writer_death``:
        ``"raise"`` ``PeerDied`` after the last complete item, or ``"wait"`` for another writer to take over.

        Readers with one `group` name share the items, each going to whichever member is free; what a dead member held
        is given to another, or dropped where the channel was made with ``redeliver=False``.

        `pin`: registers a host channel's buffers with CUDA, for asynchronous copies from them to a GPU; the slot is
        then released on the stream of the copy (``slot.release(stream)``).
        """
        from .channel_place import ReaderPlace
        from .channel_reader import Reader

        self._check()
        for value, known in ((policy, ("block", "latest")), (start, ("next", "oldest"))):
            if value not in known:
                raise InvalidArgument(f"{value!r} is none of {known}")
        if on_writer_death not in ("raise", "wait"):
            raise InvalidArgument(f"on_writer_death is 'raise' or 'wait', not {on_writer_death!r}")
        if pin and self.device.type != "cpu":
            raise InvalidArgument(f"pin=True is for channels of the host; {self.name!r} is on {self.device}")
        if group is not None and policy != "block":
            raise InvalidArgument("the readers of a group share every item: their policy is 'block'")
        self.views(writable=False)
        request = JoinReader(self.incarnation, policy, start, group)
        reply = self.session.request("join_reader", request, ReaderReply, self.session.deadline(timeout))
        try:
            place = ReaderPlace(self, reply, policy=policy, group=group)
            reader = Reader(place, policy=policy, group=group, wait=on_writer_death == "wait", pin=pin)
        except BaseException:  # without CUDA nothing is pinned
            self.session.link.post("leave_reader", LeaveReader(self.incarnation, reply.cell))
            raise
        self._users.add(place)
        return reader

    def close(self, timeout: Timeout = UNSET) -> None:
        """Closes its writer and readers, if they still are, and lets the channel go. Idempotent."""
        self._shutdown(self.session.deadline(timeout))

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def readers(self) -> int:
        """How many readers are attached now, of all processes."""
        words, control = self.control.words, self.control
        states = (words[control.reader(cell) + Words.STATE] for cell in range(self.max_readers))
        return sum(state == Words.ACTIVE for state in states)

    # -- for writers, readers and the session

    def views(self, *, writable: bool) -> Views:
        with self._lock:
            memory = self._memory.get(writable)
            if memory is None:
                memory = opening.memory(
                    self.session, self.backend, self.index, self.info.memory, self.name, writable=writable
                )
                self._memory[writable] = memory
        return Views(self.backend, memory, self.spec)

    def left(self, place: Place) -> None:
        """It has been left, and no device work of it is under way."""
        self._users.discard(place)

    def refuse(self, what: str) -> NoReturn:
        """Says why a writer or reader that was closed can do nothing."""
        if self.session.closed:
            raise SessionClosed("the session was closed: connect again")
        raise InvalidState(f"the {what} of {self.name!r} was closed: take another")

    def _check(self) -> None:
        self.session.check()
        if self._closed:
            raise InvalidState(f"the channel {self.name!r} was closed here: open it again")

    def _held(self) -> dict[str, Any]:
        held = {"kind": "channel", "name": self.name, "incarnation": self.incarnation, "cell": self.info.event.cell}
        return held if self._writer is None else {**held, "pen": not self._writer.closed}

    def _shutdown(self, deadline: Deadline) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        users, failure = list(self._users), None
        for place in users:
            try:
                place.shutdown(deadline)
            except IpcSyncError as error:
                failure = failure or error
        for place in users:
            place.settle(deadline)
        self._end_abandoned(deadline)

        def quiet() -> bool:
            return all(place.quiet() for place in users)

        if self.session.forget(self):
            self.session.detach(self.incarnation, quiet, deadline)
        if quiet():  # else a stream is still at it, and the process's end must free it
            for memory in self._memory.values():
                self.backend.free(memory)
            self.backend.unregister(self.control.region)
        self._memory.clear()
        if failure is not None:
            raise failure

    def _end_abandoned(self, deadline: Deadline) -> None:
        """Ends the stream of a writer that was collected, as it is ended of one that was kept till now; unless
        somebody else wrote on."""
        from .channel_place import unsaid

        words, ledger, event = self.control.words, self.session.ledger.words, self.session.ledger.cell
        if self.abandoned is None or words[Head.END_AT]:
            return
        at = event(self.control.event_cell)
        if self.abandoned == (words[Head.EPOCH], ledger[at + Cell.ISSUED]) and ledger[at + Cell.VERDICT] == FOREVER:
            try:
                self.session.request("join_writer", JoinWriter(self.incarnation), WriterReply, deadline)
                request = LeaveWriter(self.incarnation, unsaid(self.session))
                self.session.request("leave_writer", request, Empty, deadline)
            except IpcSyncError:
                pass  # it is another's now, or there is no broker to say it to


def create_channel(
    session: Session,
    name: str,
    *,
    shape: Any = None,
    dtype: Any = "float32",
    fields: Mapping[str, Field] | None = None,
    depth: int = 4,
    device: Any = None,
    max_readers: int = 16,
    meta_bytes: int = 4096,
    memory: Literal["broker", "session"] = "broker",
    lifetime: Literal["session", "broker"] = "session",
    redeliver: bool = True,
    exist_ok: bool = False,
    timeout: Timeout = UNSET,
) -> Channel:
    """Creates the channel `name`, a ring of `depth` equal buffers, and opens it here.

    `shape` (elements) and `dtype` of a buffer's one array, or `fields`: a map of names to :class:`Field`. An item may
    be smaller (``slot.resize``). `device`: where the buffers are; None is the accelerator, or the CPU without one.
    `max_readers`: at a time. `meta_bytes`: room for an item's ``meta``, as msgpack. `memory`: whose the buffers are,
    the broker's, which no worker's death takes away, or this session's. `lifetime`: until this session has ended and
    nobody is attached (``"session"``), or until ``session.unlink(name)`` (``"broker"``). `redeliver`: what a dead
    member of a reader group held is given to another. `exist_ok`: open it if it exists with an equal specification.

    Raises ``NameInUse``, ``QuotaExceeded``, ``OutOfSpace``, and ``InvalidArgument`` for what no channel can be.
    """
    session.check()
    named, single = fields_of(fields, shape, dtype)
    specs, stride = layout(named)
    for what, value, low, high in (
        ("depth", depth, 2, 4096),
        ("max_readers", max_readers, 1, 256),
        ("meta_bytes", meta_bytes, 0, 1 << 20),
    ):
        if not isinstance(value, int) or not low <= value <= high:
            raise InvalidArgument(f"{what} is {value!r}: from {low} to {high}")
    if memory not in ("broker", "session") or lifetime not in ("session", "broker"):
        raise InvalidArgument(f"memory and lifetime are 'broker' or 'session', not {memory!r} and {lifetime!r}")
    spec = ChannelSpec(
        fields=specs,
        stride=stride,
        depth=depth,
        max_readers=max_readers,
        meta_bytes=meta_bytes,
        memory=memory,
        lifetime=lifetime,
        redeliver=redeliver,
        single=single,
    )
    where = as_device(device)
    backend = select.backend(where)
    uuid = backend.uuid(where.index)
    owned = info = None
    if memory == "session":
        owned = backend.allocate(where.index, stride * depth, session.memory_name())
        info = MemoryInfo(owned.handle, owned.nbytes, uuid)
    request = CreateChannel(name, uuid, spec, exist_ok, info)
    try:
        made = session.request("create_channel", request, ChannelInfo, session.deadline(timeout))
    except BaseException:
        if owned is not None:
            backend.free(owned)
        raise
    if owned is not None and made.memory.handle != owned.handle:
        backend.free(owned)  # it existed, with memory of its own
    elif owned is not None:
        _kept.append(owned)
    return Channel(session, made)


def open_channel(session: Session, name: str, timeout: Timeout = UNSET) -> Channel:
    """The body of ``Session.open_channel``."""
    session.check()
    info = session.request("open_channel", Open("channel", name), ChannelInfo, session.deadline(timeout))
    with opening.attached(session, info.event.incarnation):
        return Channel(session, info)
