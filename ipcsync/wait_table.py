"""A session's outstanding device waits, as condemners find them (LEDGER.md rule 5, docs/design/ledger.md)."""

from __future__ import annotations

import threading

from .host_waits import HostWaits
from .ledger import ROUND_BITS, Block, Cell, Ledger, unpack_wait


class WaitTable:
    """This session's outstanding device waits, where a condemner finds them: one entry an event, its furthest round.

    ``host`` are its host waits, for people: nothing is decided on them.
    """

    def __init__(self, ledger: Ledger, block: int) -> None:
        self._ledger = ledger
        self._words = ledger.words
        self.host = HostWaits(ledger, block)
        at = ledger.block(block) + Block.WAITS
        self._free = list(range(at, at + Block.WAIT_COUNT))
        self._of_cell: dict[int, int] = {}
        self._lock = threading.Lock()

    def announce(self, cell: int, round: int) -> bool:
        """Stores the entry; False when the table is full of waits that are still outstanding."""
        words, entry = self._words, (cell + 1) << ROUND_BITS | round  # pack_wait
        with self._lock:
            at = self._of_cell.get(cell)
            if at is not None:
                if words[at] < entry:
                    words[at] = entry
                return True
            if not self._free:
                for other in list(self._of_cell):
                    if self._reached(other):
                        self._drop(other)
            if not self._free:
                return False
            at = self._of_cell[cell] = self._free.pop()
            words[at] = entry
            return True

    def reached(self, cell: int) -> bool:
        """Whether no wait for this cell's word is outstanding."""
        with self._lock:
            return cell not in self._of_cell or self._reached(cell)

    def forget(self, cell: int) -> None:
        """The cell may become another event's: what was reached on it is dropped now."""
        with self._lock:
            if cell in self._of_cell and self._reached(cell):
                self._drop(cell)

    def outstanding(self) -> bool:
        """Whether any wait is."""
        with self._lock:
            return not all(map(self._reached, self._of_cell))

    def _reached(self, cell: int) -> bool:
        """Its round is complete, or its verdict was passed on and its word released."""
        _, round = unpack_wait(self._words[self._of_cell[cell]])
        return bool(self._words[self._ledger.cell(cell) + Cell.WORD] >= round)

    def _drop(self, cell: int) -> None:
        at = self._of_cell.pop(cell)
        self._words[at] = 0
        self._free.append(at)
