"""What the broker knows, and what goes in and out of its decisions. Plain data: no I/O here, none in what uses it.

``Session`` and ``Thing`` are also what the journal holds (as msgpack maps), so that a restarted broker knows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from ipcsync import wire
from ipcsync.dtypes import itemsize

LEASE = 3.5  # seconds of silence of a *stopped* process after which it is taken for dead
PARKED, ALL_PARKED = 1024, 16384  # requests that wait at a time, of one session and in all
QUIET = 2.0  # seconds of silence after which it is looked at


class Session(Struct, kw_only=True):
    """One connected process (or one of its sessions)."""

    number: int
    block: int
    name: str
    namespace: str
    pid: int
    start: int
    uid: int
    pid_namespace: int
    lock: str = ""  # file of the runtime directory that its process holds locked; where its pid means nothing
    state: Literal["live", "left", "dying", "gone"] = "live"
    # left: it said goodbye, but device work of its may still be under way; gone never stays in the tables
    leased_out: bool = False
    away: bool = False  # known from the journal, not heard of since this broker started
    attached: set[int] = set()  # incarnations; the journal has it in the things
    readers: set[tuple[int, int]] = set()  # (incarnation, reader cell)
    joins: dict[int, tuple[int, int, int]] = {}  # request -> (incarnation, cell, first item), of the last few

    @property
    def label(self) -> str:
        return f"{self.name!r} (pid {self.pid})"


class Thing(Struct, kw_only=True):
    """One incarnation of an event, a channel or an array."""

    kind: wire.Kind
    namespace: str
    name: str
    incarnation: int
    cell: int  # of the current epoch
    device: str
    via: wire.Via
    lifetime: Literal["session", "broker"]
    creator: int
    request: int = 0  # the creator's request: sent again to a restarted broker, it gets the same answer
    writer_request: int = 0  # the same of whoever has the pen
    creator_ended: bool = False
    named: bool = True  # its name still leads to it
    ended: bool = False  # condemned for good (a channel may begin a new epoch instead)
    handle: bytes = b""
    channel: wire.ChannelSpec | None = None
    array: wire.ArraySpec | None = None
    memory: tuple[wire.MemoryInfo, ...] = ()
    asked: wire.Via = "auto"  # what via= said
    cells: list[int] = []  # of all epochs, the current one included
    attached: set[int] = set()  # sessions
    pen: int = 0  # the session that records, 0 nobody
    recorded: bool = False  # somebody held the pen once
    epoch: int = 1
    condemned: bool = False  # the current epoch has a verdict
    leaving: bool = False  # its recorder let go: the pen comes back when its rounds are complete
    stream_ended: Literal["", "closed", "failed"] = ""

    @property
    def spec(self) -> wire.ChannelSpec | wire.ArraySpec | None:
        return self.channel or self.array

    @property
    def control(self) -> str:
        return f"ctl-{self.incarnation}"

    @property
    def nbytes(self) -> int:
        """Broker-owned memory that it has or needs."""
        spec = self.spec
        if spec is None or spec.memory == "session":
            return 0
        if isinstance(spec, wire.ChannelSpec):
            return spec.stride * spec.depth
        return max(field.offset + math.prod(field.shape) * itemsize(field.dtype) for field in spec.fields)

    def event_info(self) -> wire.EventInfo:
        return wire.EventInfo(
            self.name, self.namespace, self.incarnation, self.cell, self.device, self.via, self.handle
        )

    def info(self) -> wire.EventInfo | wire.ChannelInfo | wire.ArrayInfo:
        if self.channel is not None:
            return wire.ChannelInfo(self.event_info(), self.channel, self.control, self.memory[0])
        if self.array is not None:
            return wire.ArrayInfo(self.event_info(), self.array, self.control, self.memory)
        return self.event_info()


class Quotas(Struct, frozen=True, kw_only=True):
    """Limits of one broker. ``session_*`` are for each session; None is no limit but the machine's."""

    sessions: int = 256
    events: int = 16384  # cells of the ledger: every event, channel and array takes one
    channels: int = 4096  # channels and arrays
    nbytes: int | None = None
    session_events: int = 16384
    session_channels: int = 4096
    session_nbytes: int | None = None


# -- inputs


@dataclass
class Received:
    """A request that fits the envelope's schema."""

    peer: bytes
    request: wire.Request


@dataclass
class Done:
    """The result of a ``Do`` that had a token."""

    token: int
    result: Any = None
    error: Exception | None = None


@dataclass
class Dying:
    """The session's life word says that its I/O thread is gone."""

    number: int


@dataclass
class Gone:
    """The session's process is gone, its memory torn down."""

    number: int


@dataclass
class Tick:
    pass


@dataclass
class Recover:
    """First of all inputs of a broker that took a ledger over. `lost`: incarnations that could not be re-opened."""

    lost: set[int]


@dataclass
class LedgerLost:
    """The ledger's file is no longer under its name: nobody new can reach it."""


@dataclass
class Stop:
    """SIGTERM."""


Input = Received | Done | Dying | Gone | Tick | Recover | LedgerLost | Stop


# -- outputs, carried out in their order


@dataclass
class Answer:
    peer: bytes
    id: int
    body: dict[str, Any] | None = None
    error: wire.Failure | None = None


@dataclass
class Announce:
    namespace: str
    kind: Literal["created", "removed", "condemned", "session", "tick", "stopping"]
    body: dict[str, Any]
    seq: int


Entity = tuple[Literal["session", "thing"], int]  # and its number


@dataclass
class Persist:
    """One entry of the journal, all of a turn's changes: each entity as it is now, None when it is no more."""

    changes: dict[Entity, Session | Thing | None]


@dataclass
class Watch:
    """Watch this session's process by pidfd and life word, or no longer."""

    number: int
    on: bool = True


@dataclass
class Leave:
    """The broker's loop ends."""


@dataclass
class Next:
    """An input of our own, to be handled once this turn's outputs are carried out: what the journal says of it must
    not be written before, or a death in between would leave it undone."""

    item: Input


@dataclass
class OpenCell:
    cell: int
    incarnation: int
    base: int = 0
    name: str = ""
    mirror: bool = False  # the recorder records the CUDA event as well, from its first round on


@dataclass
class SetPen:
    cell: int
    block: int | None


@dataclass
class RetireCell:
    """Never to be recorded again; its words stay."""

    cell: int


@dataclass
class StaleCell:
    """The name was created anew: whoever still holds the old handle is told."""

    cell: int


@dataclass
class FreeCell:
    cell: int


@dataclass
class Mirror:
    cell: int


@dataclass
class SetBlock:
    """Writes a session's block: state, and on ``live`` who it is."""

    block: int
    state: Literal["free", "live", "dying", "leased"]
    session: Session | None = None  # of "live"


@dataclass
class CondemnCells:
    """Answers {cell: first bad round}, of the whole chain."""

    cells: list[int]
    cause: int
    culprit: Session | None
    release: bool = True


@dataclass
class Build:
    """Makes what a new thing consists of; answers :class:`Built`."""

    thing: Thing


@dataclass
class Built:
    via: wire.Via
    handle: bytes = b""
    memory: tuple[wire.MemoryInfo, ...] = ()


@dataclass
class Free:
    """Lets go everything that belongs to an incarnation."""

    thing: Thing


@dataclass
class NewEpoch:
    """The channel goes on in its (new) current cell, items from `base` + 1; ``old_cell`` has the verdict."""

    thing: Thing
    old_cell: int
    base: int


@dataclass
class EndStream:
    thing: Thing
    session: Session | None
    reason: Literal["closed", "failed"]


@dataclass
class JoinRing:
    """Answers (reader cell, first item)."""

    thing: Thing
    session: Session
    body: wire.JoinReader


@dataclass
class DropReader:
    """``left``: it said that it is done; ``silent``: gets nothing more, what it holds stays held; ``dying``: its words
    are released by force, again and again; ``gone``: the last time, then the place may be given to another."""

    thing: Thing
    cell: int
    how: Literal["left", "silent", "dying", "gone"]


@dataclass
class Scavenge:
    """Removes the files that a gone process owned."""

    session: Session
    process_gone: bool


Effect = (
    OpenCell | SetPen | RetireCell | StaleCell | FreeCell | Mirror | SetBlock | CondemnCells | Build | Free
    | NewEpoch | EndStream | JoinRing | DropReader | Scavenge
)  # fmt: skip


@dataclass
class Do:
    """An effect; with a token its result comes back as :class:`Done`."""

    effect: Effect
    token: int = 0


Output = Answer | Announce | Persist | Watch | Leave | Next | Do


class Facts(Protocol):
    """What the decisions read of the world: words of the ledger, and processes."""

    def issued(self, cell: int) -> int: ...

    def drained(self, cell: int) -> bool:
        """Every round begun is complete, or released by force."""
        ...

    def verdict(self, cell: int) -> int:
        """The first bad round; ``FOREVER`` while there is none."""
        ...

    def opened(self, thing: Thing) -> bool:
        """Its current cell was given to it, and (a channel) its readers know of the current epoch."""
        ...

    def held(self, thing: Thing) -> bool:
        """The memory that the broker is to have for it is there."""
        ...

    def readers(self, thing: Thing) -> set[int]:
        """Reader cells of its control file that are not free."""
        ...

    def stream_open(self, thing: Thing) -> bool: ...

    def highest_item(self, thing: Thing) -> int:
        """The highest item number that the current epoch of a channel may have begun."""
        ...

    def dying(self, block: int) -> bool: ...

    def block_session(self, block: int) -> int:
        """The number of the session that the block was given to."""
        ...

    def closed(self, block: int) -> bool:
        """Nobody holds the life word, and nobody died with it: the session was closed."""
        ...

    def beat(self, block: int) -> int:
        """A word that a session's I/O thread changes every second; a message says the same."""
        ...

    def waiting(self, block: int) -> bool:
        """The session has device waits outstanding."""
        ...

    def holder(self, lock: str) -> int | None:
        """Pid of the process that holds a session's file locked, 0 if that cannot be told; None: it is gone."""
        ...

    def silent(self, lock: str) -> bool:
        """The process that holds this file answers no heartbeats any more, and once did: it is stopped."""
        ...

    def process(self, pid: int) -> tuple[str, int, int] | None:
        """(state letter, start time, uid) of a process; None when gone."""
        ...
