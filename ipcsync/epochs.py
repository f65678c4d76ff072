"""A channel through its writers' lives: whose items are read now, which of them are true, and how the stream ends.

An epoch is one writer's (or several that detached in order), and has an event cell of its own. It ends with a death:
its items from the verdict on will never be true, and the next epoch's begin above them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .errors import EndOfStream, IpcSyncError, PeerFailed, StaleHandle
from .ledger import Cell
from .ring import Control, Epoch, Head, ended_by

if TYPE_CHECKING:
    from .channel import Channel
    from .timeline import Timeline


class Epochs:
    """Where one reader is: ``number`` of the epoch, its ``timeline``. It goes on to the next by `follow`."""

    timeline: Timeline

    def __init__(self, channel: Channel, first: int) -> None:
        self._channel, self._control = channel, channel.control
        self._words, self._ledger = channel.control.words, channel.session.ledger.words
        epoch = int(self._words[Head.EPOCH])
        while epoch > 1 and self._words[self._control.epoch(epoch) + Epoch.BASE] >= first:
            epoch -= 1
        self._enter(epoch)

    def seen(self) -> tuple[int, int]:
        """(`issued`, `bad`), in one call."""
        ledger, at = self._ledger, self._at
        bad = ledger[at + Cell.VERDICT] if self._words[Head.EPOCH] == self.number else self.bad
        return ledger[at + Cell.ISSUED], bad

    @property
    def issued(self) -> int:
        """The last item of this epoch that was published."""
        return int(self._ledger[self._at + Cell.ISSUED])

    @property
    def bad(self) -> int:
        """The first item of this epoch that will never be true; ``FOREVER`` while there is none."""
        if self._words[Head.EPOCH] == self.number:
            return int(self._ledger[self._at + Cell.VERDICT])
        bad = self._words[self._line + Epoch.BAD]
        if self._words[self._line + Epoch.NUMBER] != self.number:
            raise self._lost()
        return int(bad)

    @property
    def over(self) -> bool:
        """Whether there is a later epoch: another writer took over."""
        return bool(self._words[Head.EPOCH] != self.number)

    def ended(self, number: int) -> bool:
        """Whether the stream was ended before item `number`."""
        return 0 < self._words[Head.END_AT] <= number

    def end(self) -> IpcSyncError:
        """How it was ended."""
        words, name = self._words, self._channel.name
        if words[Head.END_REASON] != Head.FAILED:
            return EndOfStream(f"{name!r} was closed by its writer after item {words[Head.END_AT] - 1}")
        who, pid = ended_by(self._control)
        return PeerFailed(
            f"the writer of {name!r}, session {who!r} (pid {pid}), was left by an exception: there are no items from "
            f"{words[Head.END_AT]} on; see that process's own error",
            session=who,
            pid=pid,
            round=words[Head.END_AT],
            name=name,
        )

    def follow(self) -> int:
        """Goes on to the next epoch and returns its base: its items start above it."""
        return self._enter(self.number + 1)

    def _enter(self, number: int) -> int:
        words, line, info = self._words, self._control.epoch(number), self._channel.info.event
        event = msgspec.structs.replace(
            info, cell=words[line + Epoch.CELL], incarnation=words[line + Epoch.INCARNATION]
        )
        base = int(words[line + Epoch.BASE])
        if words[line + Epoch.NUMBER] != number:
            raise self._lost()
        if event.cell != info.cell:
            event.handle = b""  # the CUDA event was of the first epoch's cell
        self.number, self._line = number, line
        self.timeline = self._channel.session.open_timeline(event)
        self._at = self.timeline.at
        return base

    def _lost(self) -> StaleHandle:
        return StaleHandle(f"more than {Head.EPOCHS} writers of {self._channel.name!r} came and went meanwhile")


def previous(control: Control, epoch: int, number: int) -> int:
    """The item before item `number`, which is of `epoch`; 0 where it is the first that ever was true."""
    bad, base = number, _line(control, epoch)[0]
    while bad <= base + 1 and epoch > 1:
        epoch -= 1
        base, bad = _line(control, epoch)
    return bad - 1 if bad > base + 1 else 0


def stands(control: Control, now: int, issued: int, epoch: int, number: int) -> bool:
    """Whether item `number` of `epoch` was published, and not condemned since; `now` and `issued` are the writer's."""
    return number <= issued if epoch == now else number < _line(control, epoch)[1]


def _line(control: Control, epoch: int) -> tuple[int, int]:
    """(base, first condemned item) of an epoch."""
    words, line = control.words, control.epoch(epoch)
    found = int(words[line + Epoch.BASE]), int(words[line + Epoch.BAD])
    if words[line + Epoch.NUMBER] != epoch:
        raise StaleHandle(
            f"this channel had more than {Head.EPOCHS} writers since: what the early ones wrote is unknown"
        )
    return found
