"""Whose turn a buffer is: the writer's choice and the readers' takes, decided on the control file's words alone.

A buffer may be written again when no reader wants its item any more. Nobody asks anybody: the writer announces what it
is about to take (CLAIMED, DROPPED), then looks at the readers' cells; a reader announces what it takes (TAKEN), then
looks at what may forbid it. x86 lets a store pass a later load, so one side of each pair pays for a fence, always the
rarer one: the broker in a join, a retirement and a verdict, the writer when it drops an item of a ``latest`` reader.

A block reader that takes items in order needs no check at all: nothing it has not released is ever written again.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import linux
from .ledger import FOREVER
from .ring import Buffer, Control, Group, Head, Reader


@dataclass(frozen=True, slots=True)
class _Seen:
    """An attached reader as the writer knows it, until the roster changes."""

    taken: int
    released: int
    done: int
    until: int
    start: int
    latest: bool
    retired: bool
    grouped: bool
    owner: int


class Choice:
    """The writer's side: which buffer the next item goes in. One thread at a time."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.words = words = control.words
        self.items = [int(words[at + Buffer.ITEM]) for at in control.buffers]
        self.order = sorted(range(control.depth), key=self.items.__getitem__)  # oldest item first; not those in use
        #: Ledger blocks of readers known to be dead: nothing waits for them. Forgotten when the roster changes.
        self.dead: set[int] = set()
        self._readers: list[_Seen] = []
        #: (RELEASED, DONE) of each: an item that all are past is wanted by nobody. None where there are groups.
        self._rows: list[tuple[int, int]] | None = None
        self._plain = False  # whether they are all `block` readers that live, and not in groups
        self._groups: list[tuple[int, int]] = []  # (index, line) of the groups that have living members
        self._roster = -1
        self._full: list[object] | None = None  # the marks when all were in use

    def pick(self) -> tuple[int, list[tuple[int, int]]] | None:
        """(a buffer, the waits that the writer's stream must do first: (word of the control file, value)); None when
        all are in use. The buffer is the caller's until `keep` or `put_back`."""
        if self._full is not None and self._full == self._marks():
            return None  # who waits asks again and again
        self._full, marks, order = None, None, self.order
        waits: list[tuple[int, int]] = []
        if order:
            b = order[0]  # the oldest: nearly always it is that one
            item = self.items[b]
            if item == 0 or self._free(b, item, waits):
                del order[0]
                return b, waits
            marks = self._marks()
        for place, b in enumerate(order):
            item, waits = self.items[b], []
            if item == 0 or self._free(b, item, waits):
                del order[place]
                return b, waits
        self._full = marks
        return None

    def _marks(self) -> list[object] | None:
        """All that can free a buffer while nothing but ``block`` readers are there that live and read on; else None."""
        words, depth = self.words, self.control.depth
        marks: list[object] = [words[Head.ROSTER]]
        if not self._plain or self.dead:
            return None
        for r in self._readers:
            if words[r.until] != FOREVER:
                return None
            marks.append(words[r.released : r.released + depth].tobytes())
        return marks

    def keep(self, b: int, item: int) -> None:
        """The buffer holds `item` now."""
        self._full = None
        self.items[b] = item
        self.order.append(b)

    def put_back(self, b: int) -> None:
        """Nothing was published in it. What it held is gone, but was claimed: nobody will ask for it."""
        self._full = None
        self.order.insert(0, b)

    def blockers(self) -> set[int]:
        """The ledger blocks of the readers for whom the writer waits: where to look for a death."""
        if self.words[Head.ROSTER] != self._roster:
            self._look()
        items = [(b, self.items[b]) for b in self.order]
        return {r.owner - 1 for r in self._readers if r.grouped or any(self._wants(r, b, item) for b, item in items)}

    def _look(self) -> None:
        control, words = self.control, self.words
        self._roster = words[Head.ROSTER]
        self._readers = []
        self.dead = set()
        for cell in range(control.max_readers):
            at = control.reader(cell)
            if words[at + Reader.STATE] != Reader.FREE:
                self._readers.append(
                    _Seen(
                        at + control.taken,
                        at + control.released,
                        at + control.done,
                        at + Reader.UNTIL,
                        words[at + Reader.START],
                        words[at + Reader.POLICY] == Reader.LATEST,
                        words[at + Reader.STATE] == Reader.RETIRED,
                        words[at + Reader.GROUP] > 0,
                        words[at + Reader.OWNER],
                    )
                )
        grouped = any(r.grouped for r in self._readers)
        self._rows = None if grouped else [(r.released, r.done) for r in self._readers]
        self._plain = not any(r.grouped or r.latest or r.retired for r in self._readers)
        groups = range(control.max_readers) if grouped else ()
        self._groups = [(index, control.group(index)) for index in groups if control.living(index)]

    def _wants(self, r: _Seen, b: int, item: int) -> bool:
        """Whether this reader holds the item, or is still to have it."""
        words = self.words
        if words[r.released + b] >= item or (item < r.start and not r.grouped):
            # A retired reader's device work may never end, if it is stopped: no stream may be made to wait for it.
            return r.retired and words[r.done + b] < item and (item >= r.start or r.grouped)
        if words[r.taken + b] >= item:
            return True
        # What of a group's nobody has taken yet is the whole group's: see _free.
        return not (r.latest or r.retired or r.grouped or words[r.until] < item or self._void(b, item))

    def _void(self, b: int, item: int) -> bool:
        return bool(self.words[self.control.buffers[b] + Buffer.VOID] == item)

    def _free(self, b: int, item: int, waits: list[tuple[int, int]]) -> bool:
        words = self.words
        while True:
            if words[Head.ROSTER] != self._roster:
                self._look()
            dropped, rows = False, self._rows
            waits.clear()
            # A member takes, then moves the cursor; and takes over, then counts it, then frees the dead one. So: the
            # cursors first, and all again if something was taken over meanwhile.
            adopted = self._adopted() if self._groups else None
            past = rows is not None
            for released, done in rows or ():
                if words[released + b] < item or words[done + b] < item:
                    past = False
                    break
            if not past:
                looked = self._given_up(b, item, waits)
                if looked is None:
                    return False
                dropped = looked
            if words[Head.CLAIMED] < item:
                words[Head.CLAIMED] = item  # announce, then look who is there
            if words[Head.ROSTER] == self._roster and (adopted is None or adopted == self._adopted()):
                break
        if not dropped:
            return True
        if words[Head.DROPPED] < item:
            words[Head.DROPPED] = item
        linux.membarrier()
        return not any(self._wants_taken(r, b, item) for r in self._readers)

    def _adopted(self) -> list[int]:
        return [self.words[line + Group.ADOPTED] for _, line in self._groups]

    def _given_up(self, b: int, item: int, waits: list[tuple[int, int]]) -> bool | None:
        """None where somebody holds the item or is still to have it; else whether it would be taken from a ``latest``
        reader. Adds the waits for those who are done with it on the host only."""
        words, dropped, void = self.words, False, self._void(b, item)
        for index, line in self._groups:
            if words[line + Group.CURSOR] <= item and not void and self.control.living(index):
                return None
        for r in self._readers:
            if r.owner - 1 in self.dead and not r.grouped:
                continue
            if self._wants(r, b, item):
                return None
            if item >= r.start or r.grouped:
                if words[r.released + b] < item:
                    dropped |= not r.grouped
                elif words[r.done + b] < item:
                    waits.append((r.done + b, item))
            before = words[r.taken + b]
            if void and words[r.released + b] < item and words[r.done + b] < before:
                # Its writer's stream had to wait for this too, and nobody knows whether it did before it died.
                if r.retired:
                    return None
                waits.append((r.done + b, before))
        return dropped

    def _wants_taken(self, r: _Seen, b: int, item: int) -> bool:
        words, asked = self.words, r.grouped or (item >= r.start and r.owner - 1 not in self.dead)
        return asked and words[r.released + b] < item <= words[r.taken + b]


class Turn:
    """A reader's side: its cell, what it takes and gives back. This one takes every item, in order (``block``)."""

    def __init__(self, control: Control, cell: int, start: int) -> None:
        self.control, self.cell, self.next = control, cell, start
        self.skipped = 0  # items passed over since the last that was taken
        self.words = control.words
        self.at = control.reader(cell)
        self.taken, self.released, self.done = (
            self.at + control.taken,
            self.at + control.released,
            self.at + control.done,
        )
        self._buffers = control.buffers
        self._likely = 0

    def ready(self, issued: int, bad: int) -> bool:
        """Whether there is something to take: items up to `issued` are, and those from `bad` on are condemned."""
        return self.next <= issued and self.next < bad

    def take(self, issued: int, bad: int) -> tuple[int, int] | None:
        """(an item, its buffer); None when it was taken away a moment ago: look again. `ready` said that there is."""
        number = self.next
        b = self._find(number)
        if b is None:
            raise AssertionError(f"item {number} is in none of the buffers, though nobody may have overwritten it")
        self.words[self.taken + b] = number
        self.words[self.at + Reader.CURSOR] = self.next = number + 1
        return number, b

    def _announce(self, b: int, number: int) -> None:
        self.words[self.taken + b] = number
        self.words[self.at + Reader.CURSOR] = self.next = number + 1

    def _find(self, number: int) -> int | None:
        depth, buffers = self.control.depth, self._buffers
        b, words = self._likely, self.words
        for _ in range(depth):  # buffers are mostly used in turn
            if words[buffers[b] + Buffer.ITEM] == number:
                self._likely = b + 1 if b + 1 < depth else 0
                return b
            b = b + 1 if b + 1 < depth else 0
        return None

    def move_to(self, number: int) -> None:
        """There are no items before `number`."""
        self.next = max(self.next, number)

    def peers_hold(self) -> bool:
        """Whether something may still come from a peer's death."""
        return False

    def close(self) -> None:
        """Lets go what it has besides its words."""

    def release(self, b: int, number: int) -> None:
        """The host is done with it; on the device it is once DONE says so, which must be under way before this."""
        words = self.words
        words[self.released + b] = number
        if words[Head.DOORBELL]:
            self.ring()

    def undo(self, b: int, number: int) -> None:
        """Takes a take back: the item is the next one again."""
        self.words[self.taken + b] = self.words[self.released + b]
        self.next = number
        self.ring()

    def ring(self) -> None:
        self.control.ring_bell()

    def stop(self) -> None:
        """Wants nothing further: the writer need not wait for what was not taken."""
        if self.words[self.at + Reader.UNTIL] == FOREVER:
            self.words[self.at + Reader.UNTIL] = self.next - 1
            self.ring()


class LatestTurn(Turn):
    """Takes the newest item there is; the writer may drop what was not taken."""

    def take(self, issued: int, bad: int) -> tuple[int, int] | None:
        words, number = self.words, min(issued, bad - 1)
        b = self._find(number)
        if b is None:
            return None  # a newer one is there by now
        words[self.taken + b] = number
        if words[Head.DROPPED] >= number:
            self.skipped += number + 1 - self.next
            self.undo(b, number + 1)
            return None
        self.skipped += number - self.next
        self._announce(b, number)
        return number, b


def publish(control: Control, b: int, number: int, epoch: int) -> None:
    """Says which item the buffer holds; it counts once that item's round is issued."""
    at, words = control.buffers[b], control.words
    words[at + Buffer.EPOCH] = epoch
    words[at + Buffer.ITEM] = number
