"""The shared page: where every word is, and who may write it.

The page is one file that the broker makes and every session maps. It has no locks: **each word has one writer at a
time**, named in the tables below; the broker inherits the words of the dead. Words are 64 bits, read and written whole
through ``memoryview.cast("Q")`` (never ``struct``, which clears first: docs/design/ledger.md).

========  =======================  ====================================================================================
section   of                       written by
========  =======================  ====================================================================================
header    1 x 4096 bytes           the broker
blocks    ``sessions`` x 4096      a block's first line and name: the broker; its life word and waits: its session;
                                   its taint: whoever condemns
cells     ``events`` x 256         line 0 (``WORD``): the recorder's stream, on the device; line 1: the recorder's host,
                                   but for its BELL (bells.py: whoever sleeps, whoever wakes);
                                   lines 2 and 3: the broker, or whoever condemns
========  =======================  ====================================================================================

A **cell** is one event's timeline: round n is complete once ``WORD`` >= n and ``VERDICT`` > n, read in that order. A
**wait entry** of a block packs (cell + 1, round) in one word, so that it appears and disappears whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

from . import bells, linux
from .errors import ProtocolMismatch, RuntimeDirectory
from .shm import Region

MAGIC = int.from_bytes(b"IPCSYNC1", "little")
LAYOUT = 1
PAGE = 4096
FOREVER = 2**63 - 1  # no verdict; and what a condemned WORD is released with: GEQ compares cyclically, so no larger


class Header:
    """Words of the header (the broker's)."""

    MAGIC, LAYOUT, FEATURES, NBYTES = 0, 1, 2, 3
    BOOT = 4  # and 5: the boot token of the broker that serves the page now
    PID, START = 6, 7  # that broker
    SESSIONS, EVENTS = 8, 9  # capacities
    BLOCKS_AT, CELLS_AT = 10, 11  # byte offsets, so that later layouts may move them
    CELLS_USED = 12  # no cell at or above this was ever given out: scans stop here
    CONDEMNING = 13  # odd while a condemnation is under way: a broker that takes over finishes it
    STATE = 14  # 1 serving, 2 stopping
    TICK = 15  # CLOCK_MONOTONIC nanoseconds of the broker loop's last turn
    SERVING, STOPPING = 1, 2


class Block:
    """Words of a session's block, from its start. 32.. are the wait entries."""

    STATE, SESSION, PID, START, LEASE = 0, 1, 2, 3, 4  # broker; LEASE = 1: declared silent, its handles are stale
    BEAT, TAINT, CULPRIT = 5, 6, 7  # session: progress; condemner: how often, and the cell + 1 that did it last
    LIFE = 8  # ..15: the robust mutex, held by the session's I/O thread
    NAME = 16  # ..23: the session's name, UTF-8, at most 64 bytes
    HOST_WAITS, HOST_WAIT_COUNT = 24, 4  # ..31: pairs (wait entry, since when and what for), see host_waits.py; session
    WAITS, WAIT_COUNT = 32, 464
    COUNTS = 496  # ..498: how long host waits ended, one word an outcome, see host_waits.py; session
    GAPS = 499  # how often a subscription of the session missed announcements; session
    FREE, LIVE, DYING, GONE = 0, 1, 2, 3


class Cell:
    """Words of an event's cell, from its start: four cache lines, one writer each."""

    WORD = 0
    ISSUED, INTENT, CUDA_ROUND = 8, 9, 10  # CUDA_ROUND: last round that the CUDA event was recorded for as well
    BELL = 11  # what hosts that wait for this cell sleep on, see bells.py: theirs and the recorder's
    VERDICT, RECORDER, INCARNATION, STATE, FLAGS = 16, 17, 18, 19, 20  # RECORDER: block + 1, 0 when nobody has the pen
    CAUSE, CULPRIT_SESSION, CULPRIT_PID = 21, 22, 23
    CULPRIT_NAME = 24  # ..31
    NAME = 24  # ..31: until there is a verdict, the event's own name (its first 64 bytes), for whoever looks for a hang
    FREE, LIVE, RETIRED = 0, 1, 2
    MIRROR = 1  # FLAGS: somebody asked for the CUDA event, so the recorder records it as well
    RELEASE = 2  # FLAGS: its word was released by force, and is again at each tick while it is retired
    # CAUSE:
    DIED, FAILED, CONDEMNED_BY_OPERATOR, RESOURCE_LOST, SILENT = 1, 2, 3, 4, 5


BLOCK_WORDS, CELL_WORDS = PAGE // 8, 256 // 8
ROUND_BITS = 44
LAST_ROUND = (1 << ROUND_BITS) - 1


def pack_wait(cell: int, round: int) -> int:
    """A wait entry: (cell + 1) above 44 bits of round. 0 is no entry."""
    return (cell + 1) << ROUND_BITS | round


def unpack_wait(entry: int) -> tuple[int, int]:
    return (entry >> ROUND_BITS) - 1, entry & LAST_ROUND


class Ledger:
    """A mapped page. ``words`` is all of it; ``block(i)`` and ``cell(i)`` are the indices of their first words."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.words = words = region.words
        if words[Header.MAGIC] != MAGIC or words[Header.LAYOUT] != LAYOUT:
            raise ProtocolMismatch(
                f"{region.path} has ledger layout {words[Header.LAYOUT]}, this ipcsync reads layout {LAYOUT}: "
                "run the broker and its clients from versions that share one",
                theirs=words[Header.LAYOUT],
                ours=LAYOUT,
            )
        self.sessions, self.events = words[Header.SESSIONS], words[Header.EVENTS]
        self._blocks, self._cells = words[Header.BLOCKS_AT] // 8, words[Header.CELLS_AT] // 8
        if not self._whole():
            raise RuntimeDirectory(
                f"{region.path} is damaged: its header does not describe its {region.nbytes} bytes. The next broker "
                "makes a new one: end this one with `ipcsync broker --stop`, and start one again",
                path=str(region.path),
            )
        region.bell_of = self._bell_of

    @classmethod
    def create(cls, path: Path, *, sessions: int = 256, events: int = 16384) -> Ledger:
        """Makes the page under `path`, complete: its space reserved, its header written, every cell free."""
        cells_at = PAGE * (1 + sessions)
        nbytes = cells_at + events * CELL_WORDS * 8

        def fill(region: Region) -> None:
            words = region.words
            words[Header.LAYOUT], words[Header.NBYTES] = LAYOUT, nbytes
            words[Header.SESSIONS], words[Header.EVENTS] = sessions, events
            words[Header.BLOCKS_AT], words[Header.CELLS_AT] = PAGE, cells_at
            words[Header.MAGIC] = MAGIC

        return cls(Region.create(path, nbytes, fill))

    @classmethod
    def open(cls, path: Path) -> Ledger:
        return cls(Region.open(path))

    def _whole(self) -> bool:
        """Whether all that the header names lies in the file: nothing below looks again."""
        words, nbytes = self.words, self.region.nbytes
        blocks, cells = words[Header.BLOCKS_AT], words[Header.CELLS_AT]
        return (
            words[Header.NBYTES] == nbytes
            and self.sessions > 0 < self.events
            and words[Header.CELLS_USED] <= self.events
            and PAGE <= blocks <= cells - self.sessions * PAGE
            and cells <= nbytes - self.events * CELL_WORDS * 8
            and blocks % PAGE == cells % PAGE == 0
        )

    def block(self, index: int) -> int:
        return self._blocks + index * BLOCK_WORDS

    def cell(self, index: int) -> int:
        return self._cells + index * CELL_WORDS

    def cell_of(self, word: int) -> int:
        """The cell that a word lies in."""
        return (word - self._cells) // CELL_WORDS

    def address(self, word: int) -> int:
        """The address of a word in this process: what a futex call takes, and on cuda the device pointer as well."""
        return self.region.address + 8 * word

    def _bell_of(self, word: int) -> int | None:
        at = word - self._cells
        return None if at < 0 else word - at % CELL_WORDS + Cell.BELL

    def wake(self, word: int) -> None:
        """Wakes whoever waits for a word of this cell."""
        bells.toll(self.region, word - (word - self._cells) % CELL_WORDS + Cell.BELL)

    # -- the boot token

    @property
    def boot(self) -> bytes:
        return b"".join(self.words[Header.BOOT + i].to_bytes(8, "little") for i in range(2))

    def set_boot(self, token: bytes) -> None:
        for i in range(2):
            self.words[Header.BOOT + i] = int.from_bytes(token[8 * i : 8 * i + 8], "little")

    # -- short texts in words

    def read_text(self, word: int, count: int = 8) -> str:
        raw = b"".join(self.words[word + i].to_bytes(8, "little") for i in range(count))
        return raw.rstrip(b"\0").decode("utf-8", "replace")

    def write_text(self, word: int, text: str, count: int = 8) -> None:
        raw = text.encode()[: 8 * count].ljust(8 * count, b"\0")
        for i in range(count):
            self.words[word + i] = int.from_bytes(raw[8 * i : 8 * i + 8], "little")

    # -- what a cell says

    def completed(self, cell: int) -> int:
        """The last round that is complete and true: the word first, the verdict after."""
        at = self.cell(cell)
        word = self.words[at + Cell.WORD]
        return min(word, self.words[at + Cell.VERDICT] - 1)

    def open_cell(self, cell: int, incarnation: int, *, flags: int = 0, base: int = 0, name: str = "") -> None:
        """Gives a free cell to a new incarnation whose rounds start at base + 1. The broker's call."""
        words, at = self.words, self.cell(cell)
        for i in range(CELL_WORDS):
            words[at + i] = 0
        words[at + Cell.WORD] = words[at + Cell.ISSUED] = words[at + Cell.INTENT] = base
        words[at + Cell.VERDICT] = FOREVER
        words[at + Cell.FLAGS] = flags
        words[at + Cell.INCARNATION] = incarnation
        self.write_text(at + Cell.NAME, name)
        words[at + Cell.STATE] = Cell.LIVE
        words[Header.CELLS_USED] = max(words[Header.CELLS_USED], cell + 1)

    def waits(self, block: int) -> Iterator[tuple[int, int]]:
        """The outstanding device waits of a session: (cell, round)."""
        at = self.block(block) + Block.WAITS
        for entry in self.words[at : at + Block.WAIT_COUNT]:
            if entry:
                yield unpack_wait(entry)

    def dying(self, block: int) -> bool:
        """Whether the session's I/O thread is gone: the kernel says so in its robust life word."""
        return bool(self.words[self.block(block) + Block.LIFE] & linux.OWNER_DIED)


def new_token() -> bytes:
    return uuid.uuid4().bytes
