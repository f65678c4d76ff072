"""The inputs and outputs of a running stage: a channel's reader or writer that counts, and knows its stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ipcsync import trace
from ipcsync.errors import EndOfStream, InvalidState, WaitTimeout

from .counters import NOTHING, Port
from .order import ORDER, Gate, Made
from .sources import Source
from .stage import Drained, Stage

if TYPE_CHECKING:
    from ipcsync import Session


_LOOK = 0.5  # seconds


class Input:
    """An input of a running stage: the items of one channel, in order.

    An item counts as finished when its turn has ended and the stage goes on. One whose turn a failure ended is not
    given back: a stage that is started again (``restart = "on-failure"``) gets it once more.

    `alone`: the stage has no other input, so what it writes is made of the item it took last. `replica`: a
    replica's outputs, which are to be told of each item. `elsewhere`: the channel is on another device than the stage.
    """

    def __init__(
        self,
        source: Source,
        port: Port,
        stage: Stage,
        *,
        alone: bool = False,
        replica: Sequence[Output] | None = None,
        elsewhere: bool = False,
    ) -> None:
        self.source, self._port, self._stage = source, port, stage
        self._alone, self._replica, self._elsewhere = alone, replica, elsewhere
        self._held = 0  # by get()
        self._ended: list[tuple[Any, int]] = []  # turns that are over if the stage goes on: (slot, bytes)

    @property
    def finished(self) -> int:
        """How many items the stage is done with, over all its lives."""
        return self._port.items

    def slots(self, *, timeout: float | None = None) -> Iterator[Any]:
        """Every item until the channel ends: ``slot.array`` (or ``slot["field"]``), ``slot.meta``, ``slot.number``.

        The slot is the stage's until the next turn, then its buffer is written again; ``slot.release()`` gives it back
        before. In a stage without outputs the slot is confirmed first: what a sink sees was computed from finished work
        only. `timeout`: seconds that one item may take to come (``WaitTimeout``); None waits for as long as the writer
        lives.
        """
        while True:
            try:
                slot = self.take(timeout=timeout)
            except EndOfStream:
                return
            with nullcontext() if self._stage.outputs else timed(self._stage):
                yield slot

    @contextmanager
    def get(self, *, timeout: float | None = None) -> Iterator[Any]:
        """The next item, for the length of the block; ``EndOfStream`` after the last."""
        slot = self._next(timeout)
        nbytes = _nbytes(slot)
        self._held += 1
        try:
            yield slot
        except BaseException:
            self._ended.append((slot, nbytes))
            raise
        finally:
            self._held -= 1
        self._finish(slot, nbytes)

    def take(self, *, timeout: float | None = None) -> Any:
        """The next item, until the one after it is taken."""
        slot = self._next(timeout)
        self._ended.append((slot, _nbytes(slot)))  # whatever ends this turn but a failure, it is over then
        return slot

    def finish(self) -> None:
        """The stage goes on, or has returned: gives back what it is done with."""
        while self._ended:
            self._finish(*self._ended.pop(0))

    def _next(self, timeout: float | None) -> Any:
        self.finish()
        if self._held and self._replica is not None:  # at the end each would wait for what the others hold
            raise InvalidState(
                f"{self._stage.name!r} is a replica: it is done with one item before it takes the next; a stage that "
                "makes one of several has no replicas"
            )
        slot = self._take(timeout)
        if not self._stage.outputs or self._elsewhere:
            slot.confirm()
        self._port.hop(time.monotonic_ns() - slot.published)
        self._stage.made = Made(slot.number, slot.previous if self._replica else 0) if self._alone else None
        for output in self._replica or ():
            output.owe(self._stage.made)
        return slot

    def _take(self, timeout: float | None) -> Any:
        if self._stage.leaving is None:
            return self.source.take(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while not self._stage.leaving.is_set():  # a signal must get through to a stage that waits
            left = _LOOK if until is None else max(0.0, until - time.monotonic())
            try:
                return self.source.take(min(left, _LOOK))
            except WaitTimeout:
                if left <= _LOOK and until is not None:
                    raise
        raise EndOfStream(f"stage {self._stage.name!r} was asked to leave")

    def _finish(self, slot: Any, nbytes: int) -> None:
        if self._elsewhere and self._stage.stream is not None:
            self._stage.stream.synchronize()  # its copy of the item is not on the channel's own streams
        for output in self._replica or ():
            output.over(slot.number)
        self.source.finish(slot, nbytes)


def arrived(session: Session, inputs: Sequence[Input], timeout: float | None) -> list[Input]:
    """Those that have an item, or have ended, after waiting for at most `timeout`; none if that passed."""
    ready = [each for each in inputs if each.source.ready() or not each.source.readers]
    if ready:
        return ready
    owner = {reader: each for each in inputs for reader in each.source.readers}
    return list(dict.fromkeys(owner[reader] for reader in session.select(list(owner), timeout)))


class Output:
    """An output of a running stage: the one writer of a channel.

    `again`: the stage may be started again, or has been. What a killed life of it had published of an item is not
    published a second time when the item is given to it again. `gate`: of a replica.
    """

    def __init__(
        self,
        writer: Any,
        port: Port,
        stage: Stage,
        *,
        stream: Any = None,
        again: bool = False,
        gate: Gate | None = None,
        elsewhere: bool = False,
    ) -> None:
        self._writer, self._port, self._stage, self._stream = writer, port, stage, stream
        self._again, self._gate, self._elsewhere = again, gate, elsewhere
        self._before = port.settle(writer.stands) if again else None  # (item, part) last published
        self._part, self._made = 0, -1
        self._number: int | None = None  # of the last item published in this life
        self._owed: list[Made] = []  # a replica's items that nothing was written of yet

    @property
    def written(self) -> int:
        """How many items the stage has published here, over all its lives: where a source goes on that was started
        again."""
        return self._port.items

    @contextmanager
    def slot(self, *, meta: Mapping[str, Any] | None = None, timeout: float | None = None) -> Iterator[Any]:
        """A buffer to fill: ``slot.array[...] = ...`` (or ``slot["field"]``), published when the block ends.

        An exception in the block publishes nothing, and so does ``slot.discard()``. `meta` is a small map that goes
        with the item. `timeout`: seconds to wait for a buffer that every reader is done with.
        """
        stage, made = self._stage, self._stage.made
        if stage.draining and not stage.inputs:
            raise Drained
        if self._gate is not None:
            made = self._admit(made, timeout)
        with self._writer.slot(self._stream, meta=dict(meta or {}), timeout=timeout) as slot:
            # The block's device is the channel's; what the stage computes in it is to be on its own.
            own = stage.stream if self._elsewhere and stage.stream is not None else nullcontext()
            with own, timed(stage):
                yield slot
            if slot.number is None:  # discarded
                return
            if self._elsewhere and stage.stream is not None:
                stage.stream.synchronize()  # its copy to the channel's device is not on the channel's own streams
            nbytes = _nbytes(slot)
            if self._again and not self._begin(slot, made, nbytes):
                slot.discard()
            elif self._gate is not None and made is not None:
                slot.meta[ORDER] = list(made)
        if slot.number is not None:
            self._number = slot.number
            self._port.count(slot.number, nbytes)
        if made in self._owed:
            self._owed.remove(made)

    def _begin(self, slot: Any, made: Made | None, nbytes: int) -> bool:
        """Notes what is about to be published; False if it was already."""
        item = made.number if made is not None else 0
        self._part = self._part + 1 if item == self._made else 0
        self._made = item
        if item and self._before is not None and item == self._before[0] and self._part <= self._before[1]:
            return False
        number = slot.number if self._number is None else self._number + 1  # others may have been open at once
        self._port.begin(item, min(self._part, NOTHING - 1), slot.epoch, number, nbytes)
        return True

    # -- a replica's

    def owe(self, made: Made | None) -> None:
        """The stage took an item."""
        if made is not None:
            self._owed.append(made)

    def over(self, number: int) -> None:
        """The stage is done with it. If it has written nothing of it, that is said: others wait for it."""
        for made in [made for made in self._owed if made.number == number]:
            self._nothing(made)

    def _admit(self, made: Made | None, timeout: float | None) -> Made:
        name = self._stage.name
        if made is None or made not in self._owed:
            raise InvalidState(
                f"{name!r} is a replica: it writes at most one item for each that it has taken, so that their order "
                "can be kept; without replicas a stage may write as it likes"
            )
        assert self._gate is not None
        self._gate.wait(made, timeout, f"replica {name!r} is ahead of the others")
        return made

    def _nothing(self, made: Made) -> None:
        self._owed.remove(made)
        if self._before is not None and self._before[0] == made.number:
            return
        assert self._gate is not None
        self._gate.wait(made, None, "")
        with self._writer.slot(self._stream, meta={ORDER: [*made, 0]}, timeout=None) as slot:
            number = slot.number if self._number is None else self._number + 1
            if self._again:
                self._port.begin(made.number, NOTHING, slot.epoch, number, 0)
        self._number = slot.number
        self._port.passed(slot.number)


def _nbytes(slot: Any) -> int:
    return sum(slot[name].nbytes for name in slot)


def timed(stage: Stage) -> AbstractContextManager[None]:
    """For a trace: the time that the device takes for what the block enqueues."""
    recorder = trace.ACTIVE
    if recorder is None or stage.device.type == "cpu":
        return nullcontext()
    return recorder.gpu(stage.name, stage.stream)
