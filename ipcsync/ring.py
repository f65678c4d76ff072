"""The control files of channels and shared arrays: where every word is, who writes it, and what the broker does there.

A control file is a small shared file that the broker makes; writer and readers map it. Like the ledger it has no locks:
each word has one writer at a time, and the broker inherits the words of the dead. How a writer chooses a buffer and a
reader takes an item is in ``turns.py``; this module is the layout, and the broker's calls:

=====================  ==============================================================================================
call                   when
=====================  ==============================================================================================
``create``             create_channel: the file appears complete, epoch 1 on the channel's first event cell
``free_reader``        join_reader: a reader cell that nobody has, or None (``QuotaExceeded`` of ``max_readers``)
``join``               join_reader: gives the cell; returns the first item the reader must account for
``leave``              leave_reader: the reader has released everything and its device work on it is done; or, after
                       ``drop``, its process is gone: the cell may be given to another
``retire``             the reader's lease ran out (it is stopped): it gets nothing more, what it holds stays held
``drop``               the reader is dying: its words are released by force; again at each tick until it is gone
``highest_item``       join_writer after a condemned epoch: the new base is at least this and the old cell's INTENT
``new_epoch``          join_writer after a condemned epoch: readers that wait go on at base + 1, with the new cell
``end``                leave_writer(end="closed" | "failed"): no items after the last issued one, for good
``create_array`` ...   the same for shared arrays: ``join_array``, and leave, drop, free_reader as above
=====================  ==============================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from . import bells, linux
from .errors import ProtocolMismatch
from .ledger import FOREVER, Cell, Ledger
from .shm import Region
from .wire import ArraySpec, ChannelSpec

MAGIC = int.from_bytes(b"IPCSRING", "little")
VERSION = 1
ARRAY_META_BYTES = 4096


class Head:
    """Words of the header: 512, a line apart where their writers differ."""

    MAGIC, VERSION, NBYTES, DEPTH, MAX_READERS, META_BYTES, EXTENTS = 0, 1, 2, 3, 4, 5, 6
    BUFFERS_AT, READERS_AT, BUFFER_WORDS, READER_WORDS, GROUPS_AT, REDELIVER = 8, 9, 10, 11, 12, 13
    # the broker:
    ROSTER = 16  # grows after every change of a reader cell's STATE or START
    EPOCH = 24  # of the writer now, or of the last one; its line of the table is complete before this says so
    END_AT, END_REASON, END_PID = 32, 33, 34  # END_AT: the item number after the last; 0 while the stream is open
    END_NAME = 40  # ..47: the session that ended it
    # the writer:
    CLAIMED = 64  # highest item whose buffer may be written again; arrays: the version begun last
    DROPPED = 65  # highest item taken from `latest` readers that had not taken it
    META_LEN = 66  # arrays: bytes of the version's meta
    # what the writer sleeps on, and who waits for others of a reader group: theirs and the readers', see bells.py
    DOORBELL = 72
    # the broker: the last EPOCHS epochs, for readers that were busy while writers came and went; see `Epoch`
    TABLE, EPOCHS = 128, 64
    WORDS = 512
    CLOSED, FAILED = 1, 2


class Epoch:
    """Words of an epoch's line in the table (epoch e is at e % EPOCHS). The broker's."""

    NUMBER, CELL, INCARNATION, BASE = 0, 1, 2, 3  # its items start at BASE + 1
    BAD = 4  # once a later epoch began: the first item of this one that was condemned
    WORDS = 5


class Buffer:
    """Words of a buffer's record: the writer's, but for VOID. EXTENT_WORDS follow, then the bytes of meta."""

    ITEM = 0  # the item it holds; 0 before the first. Readers look here for the buffer of an item that was issued
    EPOCH = 1  # that item's
    PUBLISHED = 3  # CLOCK_MONOTONIC nanoseconds of its publication
    SIZES = 2  # 1 << 32 if extents are stored (the item is smaller than the field), plus the bytes of meta
    VOID = 8  # the broker: equals ITEM when that item was condemned with its epoch, so nobody will take it
    EXTENTS = 16


class Reader:
    """Words of a reader's cell; TAKEN, RELEASED and DONE are `depth` words each, from `Control`'s offsets."""

    STATE, OWNER, POLICY, START = 0, 1, 2, 3  # broker; OWNER: block + 1
    GROUP, GONE = 4, 5  # broker; GROUP: index of the group's line + 1; GONE: a dead member's process is gone
    CURSOR, UNTIL, SKIPPED = 8, 9, 10  # reader; UNTIL: the last item it accounts for, FOREVER while it reads
    AWAITED = 11  # reader: the item that it waits for as one of several (`session.select`); 0 while it does not
    BEGUN, RELEASED, DONE = 8, 16, 24  # an array's: reads begun and ended (host), ended (device), of each of its LANES
    LANES = 8
    WORDS = 16
    ARRAY_WORDS = 32
    FREE, ACTIVE, RETIRED = 0, 1, 2
    BLOCK, LATEST = 1, 2


class Group:
    """Words of a reader group's line. The broker's while nobody is in it, then its members', under the group's lock."""

    NUMBER = 0  # the broker: a hash of its name; a line without members is free
    CURSOR = 1  # the next item that no member has taken
    ADOPTED = 2  # grows when a member takes over what a dead one held, before the dead one's RELEASED says so
    WORDS = 8


def _lines(words: int) -> int:
    return (words + 7) // 8 * 8


class Control:
    """A mapped control file, of a channel or an array (``depth`` 0)."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.words = words = region.words
        if words[Head.MAGIC] != MAGIC or words[Head.VERSION] != VERSION:
            raise ProtocolMismatch(
                f"{region.path} has control layout {words[Head.VERSION]}, this ipcsync reads layout {VERSION}: "
                "run the broker and its clients from versions that share one",
                theirs=words[Head.VERSION],
                ours=VERSION,
            )
        self.depth, self.max_readers = words[Head.DEPTH], words[Head.MAX_READERS]
        self._readers, self._reader_words = words[Head.READERS_AT], words[Head.READER_WORDS]
        self._groups = words[Head.GROUPS_AT]
        line = _lines(self.depth)
        self.taken, self.released, self.done = (Reader.WORDS + i * line for i in range(3))
        self.meta_words = Buffer.EXTENTS + _lines(words[Head.EXTENTS]) if self.depth else 0
        first, each = words[Head.BUFFERS_AT], words[Head.BUFFER_WORDS]
        self.buffers = [first + b * each for b in range(max(1, self.depth))]  # their records; an array has one

    def meta_at(self, buffer: int = 0) -> int:
        """Byte offset of a buffer's meta in the file; of an array's, which has one."""
        return 8 * (self.buffers[buffer] + self.meta_words)

    def epoch(self, number: int) -> int:
        return Head.TABLE + number % Head.EPOCHS * Epoch.WORDS

    @property
    def event_cell(self) -> int:
        """The ledger cell whose rounds are the items of the epoch now."""
        return int(self.words[self.epoch(self.words[Head.EPOCH]) + Epoch.CELL])

    def group(self, index: int) -> int:
        return int(self._groups + index * Group.WORDS)

    def members(self, index: int) -> list[int]:
        """The cells of a group's members, dead ones included."""
        words = self.words
        return [
            cell
            for cell in range(self.max_readers)
            if words[self.reader(cell) + Reader.GROUP] == index + 1
            and words[self.reader(cell) + Reader.STATE] != Reader.FREE
        ]

    def living(self, index: int) -> list[int]:
        """Those members that will take further items."""
        words, found = self.words, []
        for cell in self.members(index):
            at = self.reader(cell)
            if words[at + Reader.STATE] == Reader.ACTIVE and words[at + Reader.UNTIL] == FOREVER:
                found.append(cell)
        return found

    def holding(self, cell: int) -> bool:
        """Whether the reader of `cell` has taken items that it has not released."""
        words, at = self.words, self.reader(cell)
        return any(words[at + self.released + b] < words[at + self.taken + b] for b in range(self.depth))

    def reader(self, cell: int) -> int:
        return int(self._readers + cell * self._reader_words)

    def ring_bell(self) -> None:
        """Wakes the writer if it sleeps: a buffer may have become free."""
        bells.ring(self.region, Head.DOORBELL)

    def wake(self, word: int) -> None:
        linux.futex_wake(self.region.address + 8 * word)


def open_control(path: Path) -> Control:
    return Control(Region.open(path))


# -- the broker: channels


def create(path: Path, spec: ChannelSpec, *, cell: int, incarnation: int) -> Control:
    """Makes a channel's control file. `cell` and `incarnation` are of the event that its items are rounds of."""
    extents = sum(len(field.shape) for field in spec.fields)
    buffer_words = _lines(Buffer.EXTENTS + _lines(extents) + (spec.meta_bytes + 7) // 8)
    reader_words = Reader.WORDS + 3 * _lines(spec.depth)
    buffers_at = Head.WORDS
    readers_at = buffers_at + spec.depth * buffer_words
    groups_at = readers_at + spec.max_readers * reader_words
    nbytes = 8 * (groups_at + spec.max_readers * Group.WORDS)

    def fill(region: Region) -> None:
        words = region.words
        words[Head.VERSION], words[Head.NBYTES] = VERSION, nbytes
        words[Head.DEPTH], words[Head.MAX_READERS] = spec.depth, spec.max_readers
        words[Head.META_BYTES], words[Head.EXTENTS] = spec.meta_bytes, extents
        words[Head.BUFFERS_AT], words[Head.READERS_AT] = buffers_at, readers_at
        words[Head.BUFFER_WORDS], words[Head.READER_WORDS] = buffer_words, reader_words
        words[Head.GROUPS_AT], words[Head.REDELIVER] = groups_at, spec.redeliver
        line = Head.TABLE + Epoch.WORDS
        words[line + Epoch.NUMBER], words[line + Epoch.CELL], words[line + Epoch.INCARNATION] = 1, cell, incarnation
        words[Head.EPOCH] = 1
        words[Head.MAGIC] = MAGIC

    return Control(Region.create(path, nbytes, fill))


def free_reader(control: Control) -> int | None:
    """A reader cell that nobody has; None when all ``max_readers`` are taken."""
    words = control.words
    for cell in range(control.max_readers):
        at = control.reader(cell)
        if words[at + Reader.STATE] == Reader.FREE or (words[at + Reader.GONE] and not control.holding(cell)):
            return cell
    return None


def join(
    control: Control,
    ledger: Ledger,
    cell: int,
    *,
    block: int,
    policy: Literal["block", "latest"] = "block",
    start: Literal["next", "oldest"] = "next",
    group: int = 0,
) -> int:
    """Gives a free reader cell to the session of `block`; returns the first item that it must account for. `group` is
    a number that its name hashes to, 0 for none: the members of a group account for its items together.

    The writer stores CLAIMED, then looks at the cells; this stores the cell, fences, then looks at CLAIMED. So of every
    item either the writer sees that this reader wants it, or this sees that it was given up. The fence is here because
    joins are rare.
    """
    words, at = control.words, control.reader(cell)
    if start == "next":
        cursor = ledger.words[ledger.cell(control.event_cell) + Cell.ISSUED] + 1
    else:
        cursor = words[control.epoch(words[Head.EPOCH]) + Epoch.BASE] + 1
    index, others = _group(control, group) if group else (-1, False)
    if group and not others:
        words[control.group(index) + Group.CURSOR] = cursor
    for b in range(control.depth):
        # Not DONE: a wait of the writer's stream on what the cell's last owner left there may still be outstanding.
        words[at + control.released + b] = words[at + control.taken + b] = 0
    words[at + Reader.OWNER], words[at + Reader.GROUP], words[at + Reader.GONE] = block + 1, index + 1, 0
    words[at + Reader.POLICY] = Reader.LATEST if policy == "latest" else Reader.BLOCK
    words[at + Reader.UNTIL], words[at + Reader.SKIPPED], words[at + Reader.AWAITED] = FOREVER, 0, 0
    words[at + Reader.START] = words[at + Reader.CURSOR] = cursor
    words[at + Reader.STATE] = Reader.ACTIVE
    words[Head.ROSTER] += 1
    linux.membarrier()
    first = max(cursor, words[Head.CLAIMED] + 1)
    for b in range(control.depth):
        # Every wait ever put on these words was for a claimed item, so this satisfies them all.
        words[at + control.done + b] = first - 1
    words[at + Reader.START] = words[at + Reader.CURSOR] = first
    if group and not others:
        words[control.group(index) + Group.CURSOR] = first
    _changed(control)
    return int(first)


def _group(control: Control, number: int) -> tuple[int, bool]:
    """(the line of a group, whether it has members that live)."""
    free = -1
    for index in range(control.max_readers):
        if not control.members(index):
            free = index if free < 0 else free
        elif control.words[control.group(index) + Group.NUMBER] == number:
            return index, bool(control.living(index))
    control.words[control.group(free) + Group.NUMBER] = number  # there are as many lines as readers
    return free, False


def leave(control: Control, cell: int) -> None:
    """The reader is done with everything, on the device too, or was dropped and its process is gone: the cell is free.
    But what a member of a group held when it died, or had taken and its user never got (a ``get()`` that was
    interrupted or timed out), is given to another first."""
    words, at = control.words, control.reader(cell)
    group = int(words[at + Reader.GROUP]) - 1
    if group >= 0 and words[Head.REDELIVER] and control.holding(cell):
        words[at + Reader.STATE], words[at + Reader.GONE] = Reader.RETIRED, 1
        for b in range(control.depth):
            words[at + control.done + b] = FOREVER
            control.wake(at + control.done + b)
    else:
        words[at + Reader.STATE] = Reader.FREE
    _abandon(control, group)
    _changed(control)


def _abandon(control: Control, group: int) -> None:
    """What a group's dead members held is given to nobody once no member lives."""
    if group < 0 or control.living(group):
        return
    for cell in control.members(group):
        at = control.reader(cell)
        if control.words[at + Reader.STATE] == Reader.RETIRED and control.words[at + control.done] == FOREVER:
            for b in range(control.depth):
                control.words[at + control.released + b] = FOREVER


def retire(control: Control, cell: int) -> None:
    """The reader's lease ran out: it is asked for no more items, and what it holds stays held until it is gone.

    It stores TAKEN, then looks at STATE; this stores STATE, then fences: afterwards the writer sees all it ever took.
    """
    control.words[control.reader(cell) + Reader.STATE] = Reader.RETIRED
    linux.membarrier()
    _changed(control)


def drop(control: Control, cell: int) -> None:
    """The reader is dying: releases its words by force. A write of its device may still land after this, so it is done
    again at each tick until the process is gone. These words order re-use and carry no data: nothing is condemned.

    What a dead member of a group had taken stays taken, for the others to take over (``redeliver``).
    """
    words, at = control.words, control.reader(cell)
    first = words[at + Reader.STATE] != Reader.RETIRED
    words[at + Reader.STATE] = Reader.RETIRED
    count, released, done = control.depth, control.released, control.done
    if not control.depth:
        count, released, done = Reader.LANES, Reader.RELEASED, Reader.DONE
    group = int(words[at + Reader.GROUP]) - 1 if control.depth else -1
    given_again = group >= 0 and words[Head.REDELIVER] and control.living(group)
    for b in range(count):
        if not given_again:
            words[at + released + b] = FOREVER
        if words[at + done + b] != FOREVER:
            words[at + done + b] = FOREVER
            control.wake(at + done + b)
            first = True
    _abandon(control, group)
    if first:
        _changed(control)


def _changed(control: Control) -> None:
    """The roster changed: a writer that waits looks again."""
    words = control.words
    words[Head.ROSTER] += 1
    bells.toll(control.region, Head.DOORBELL)


def highest_item(control: Control) -> int:
    """The highest item number that a dead writer may have left in a buffer, issued or not."""
    return max(int(control.words[control.buffers[b] + Buffer.ITEM]) for b in range(control.depth))


def new_epoch(control: Control, *, cell: int, incarnation: int, base: int, first_bad: int) -> int:
    """A new writer's epoch, whose items start at `base` + 1 on the event `cell`; returns its number.

    Items of the old epoch from `first_bad` (its verdict) on will be taken by nobody, so their buffers are marked void.
    """
    words = control.words
    for b in range(control.depth):
        item = words[control.buffers[b] + Buffer.ITEM]
        if item >= first_bad:
            words[control.buffers[b] + Buffer.VOID] = item
    number = words[Head.EPOCH] + 1
    words[control.epoch(number - 1) + Epoch.BAD] = first_bad
    at = control.epoch(number)
    words[at + Epoch.CELL], words[at + Epoch.INCARNATION] = cell, incarnation
    words[at + Epoch.BASE], words[at + Epoch.BAD] = base, 0
    words[at + Epoch.NUMBER] = number
    words[Head.EPOCH] = number
    control.wake(Head.EPOCH)
    return int(number)


def end(
    control: Control, ledger: Ledger, reason: Literal["closed", "failed"], *, pid: int = 0, session: str = ""
) -> None:
    """Ends the stream after its last issued item. `pid` and `session` (its name) say whose failure it was."""
    words, event = control.words, ledger.cell(control.event_cell)
    words[Head.END_PID] = pid
    raw = session.encode()[:64].ljust(64, b"\0")
    for i in range(8):
        words[Head.END_NAME + i] = int.from_bytes(raw[8 * i : 8 * i + 8], "little")
    words[Head.END_REASON] = Head.FAILED if reason == "failed" else Head.CLOSED
    words[Head.END_AT] = ledger.words[event + Cell.ISSUED] + 1
    ledger.wake(event + Cell.ISSUED)
    control.wake(Head.EPOCH)


def ended_by(control: Control) -> tuple[str, int]:
    """(name of the session, its pid) that ended the stream by an exception."""
    raw = b"".join(control.words[Head.END_NAME + i].to_bytes(8, "little") for i in range(8))
    return raw.rstrip(b"\0").decode("utf-8", "replace"), int(control.words[Head.END_PID])


# -- the broker: shared arrays


def create_array(path: Path, spec: ArraySpec) -> Control:
    """Makes a shared array's control file: reader cells, and room for one version's meta behind them."""
    meta_at = Head.WORDS + spec.max_readers * Reader.ARRAY_WORDS
    nbytes = 8 * meta_at + ARRAY_META_BYTES

    def fill(region: Region) -> None:
        words = region.words
        words[Head.VERSION], words[Head.NBYTES] = VERSION, nbytes
        words[Head.MAX_READERS], words[Head.META_BYTES] = spec.max_readers, ARRAY_META_BYTES
        words[Head.READERS_AT], words[Head.READER_WORDS] = Head.WORDS, Reader.ARRAY_WORDS
        words[Head.BUFFERS_AT] = meta_at
        words[Head.MAGIC] = MAGIC

    return Control(Region.create(path, nbytes, fill))


def join_array(control: Control, cell: int, *, block: int) -> None:
    """Gives a free reader cell of an array to the session of `block`. What it counts goes on from its last owner's
    count: a wait of the writer's stream on it may still be outstanding."""
    words, at = control.words, control.reader(cell)
    for lane in range(Reader.LANES):
        words[at + Reader.RELEASED + lane] = words[at + Reader.DONE + lane] = words[at + Reader.BEGUN + lane]
    words[at + Reader.OWNER] = block + 1
    words[at + Reader.STATE] = Reader.ACTIVE
    _changed(control)
