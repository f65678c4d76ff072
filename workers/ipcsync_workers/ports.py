"""The inputs and outputs of a running stage: a channel's reader or writer that counts, and knows its stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ipcsync import trace
from ipcsync.errors import EndOfStream

from .counters import Port
from .stage import Drained, Stage


class Input:
    """An input of a running stage: the items of one channel, in order.

    An item counts as finished when its turn has ended and the stage goes on. One whose turn a failure ended is not
    given back: a stage that is started again (``restart = "on-failure"``) gets it once more.
    """

    def __init__(self, reader: Any, port: Port, stage: Stage, *, resume_after: int = 0) -> None:
        self._reader, self._port, self._stage = reader, port, stage
        self._resume_after = resume_after
        self._ended: list[tuple[Any, int]] = []  # turns that are over if the stage goes on: (slot, bytes)

    def slots(self, *, timeout: float | None = None) -> Iterator[Any]:
        """Every item until the channel ends: ``slot.array`` (or ``slot["field"]``), ``slot.meta``, ``slot.number``.

        The slot is the stage's until the next turn, then its buffer is written again; ``slot.release()`` gives it back
        before. In a stage without outputs the slot is confirmed first: what a sink sees was computed from finished work
        only. `timeout`: seconds that one item may take to come (``WaitTimeout``); None waits for as long as the writer
        lives.
        """
        while True:
            try:
                slot = self._next(timeout)
            except EndOfStream:
                return
            self._ended.append((slot, _nbytes(slot)))  # whatever ends this turn but a failure, it is over then
            with nullcontext() if self._stage.outputs else _timed(self._stage):
                yield slot

    @contextmanager
    def get(self, *, timeout: float | None = None) -> Iterator[Any]:
        """The next item, for the length of the block; ``EndOfStream`` after the last."""
        slot = self._next(timeout)
        nbytes = _nbytes(slot)
        try:
            yield slot
        except BaseException:
            self._ended.append((slot, nbytes))
            raise
        self._finish(slot, nbytes)

    def finish(self) -> None:
        """The stage goes on, or has returned: gives back what it is done with."""
        while self._ended:
            self._finish(*self._ended.pop(0))

    def _next(self, timeout: float | None) -> Any:
        self.finish()
        while True:
            slot = self._reader.get(self._stage.stream, timeout=timeout)
            if slot.number > self._resume_after:
                break
            slot.release()  # finished before the stage was started again, but not given back
        if not self._stage.outputs:
            slot.confirm()
        self._port.hop(time.monotonic_ns() - slot.published)
        return slot

    def _finish(self, slot: Any, nbytes: int) -> None:
        self._port.count(slot.number, nbytes)  # first: an item counted and not given back is known, see _next
        slot.release()


class Output:
    """An output of a running stage: the one writer of a channel."""

    def __init__(self, writer: Any, port: Port, stage: Stage) -> None:
        self._writer, self._port, self._stage = writer, port, stage

    @contextmanager
    def slot(self, *, meta: Mapping[str, Any] | None = None, timeout: float | None = None) -> Iterator[Any]:
        """A buffer to fill: ``slot.array[...] = ...`` (or ``slot["field"]``), published when the block ends.

        An exception in the block publishes nothing, and so does ``slot.discard()``. `meta` is a small map that goes
        with the item. `timeout`: seconds to wait for a buffer that every reader is done with.
        """
        if self._stage.draining and not self._stage.inputs:
            raise Drained
        with self._writer.slot(self._stage.stream, meta=dict(meta or {}), timeout=timeout) as slot:
            with _timed(self._stage):
                yield slot
            nbytes = 0 if slot.number is None else _nbytes(slot)
        if slot.number is not None:  # else it was discarded
            self._port.count(slot.number, nbytes)


def _nbytes(slot: Any) -> int:
    return sum(slot[name].nbytes for name in slot)


def _timed(stage: Stage) -> AbstractContextManager[None]:
    """For a trace: the time that the device takes for what the block enqueues."""
    recorder = trace.ACTIVE
    if recorder is None or stage.device.type == "cpu":
        return nullcontext()
    return recorder.gpu(stage.name, stage.stream)
