"""Where an input's items come from: one channel, or those of the replicas that write it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ipcsync.errors import EndOfStream, InvalidState, WaitTimeout

from .counters import Port
from .order import ORDER, Board, Made, Order

if TYPE_CHECKING:
    from ipcsync import Reader, Session


class Item:
    """An item of a replica's channel under the number of what it was made of; otherwise the slot itself."""

    __slots__ = ("number", "previous", "slot")

    def __init__(self, slot: Any, made: Made) -> None:
        self.slot = slot
        self.number, self.previous = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.slot, name)

    def __getitem__(self, name: str) -> Any:
        return self.slot[name]

    def __contains__(self, name: object) -> bool:
        return name in self.slot

    def __iter__(self) -> Iterator[str]:
        return iter(self.slot)

    def __len__(self) -> int:
        return len(self.slot)


class Source(Protocol):
    """``readers``: those whose stream has not ended."""

    readers: list[Reader]

    def take(self, timeout: float | None) -> Any:
        """The next item; ``EndOfStream`` after the last, ``WaitTimeout`` (at 0: there is none now)."""

    def ready(self) -> bool:
        """Whether one is here that no reader needs to be asked for."""

    def finish(self, slot: Any, nbytes: int) -> None:
        """The stage is done with it. It is counted, then given back: what a kill in between leaves is known."""


class Marks:
    """What the replicas of a stage finished last, each: so nothing is done twice that a killed one had counted and not
    given back."""

    def __init__(self, board: Board, words: Sequence[int], own: int) -> None:
        self._board, self._words, self._own = board, words, own

    def __contains__(self, number: int) -> bool:
        return any(self._board[word] == number for word in self._words)

    def add(self, number: int) -> None:
        self._board[self._own] = number


class Last(set[int]):
    """The same for a stage without replicas: the last item of its life before this one."""

    def add(self, number: int) -> None:
        """Further ones are not asked about."""


class One:
    """A channel that one worker writes."""

    def __init__(self, reader: Reader, stream: Any, port: Port, finished: Marks | Last) -> None:
        self._reader, self._stream, self._port, self._finished = reader, stream, port, finished
        self.readers = [reader]

    def take(self, timeout: float | None) -> Any:
        while True:
            slot = self._reader.get(self._stream, timeout=timeout if timeout != 0 else _moment(self._stream))
            if slot.number not in self._finished:
                return slot
            slot.release()

    def ready(self) -> bool:
        return False

    def finish(self, slot: Any, nbytes: int) -> None:
        self._port.count(slot.number, nbytes)
        self._finished.add(slot.number)
        slot.release()


def _moment(stream: Any) -> float:
    """For "if there is one": on a GPU an item that is there may still have to wait for the wait budget."""
    return 0.0 if stream is None else 0.01


class _Several:
    """The channels of a stage's replicas."""

    def __init__(self, session: Session, readers: Sequence[Reader], stream: Any, port: Port) -> None:
        self._session, self._stream, self._port = session, stream, port
        self.readers = list(readers)

    def _arrived(self, timeout: float | None) -> Iterator[tuple[Any, Made, bool]]:
        """(slot, what it was made of, whether there is anything of that), one of each reader that has something, after
        waiting for at most `timeout`. ``EndOfStream`` when all have ended."""
        if not self.readers:
            raise EndOfStream("every replica has ended")
        ready = self._session.select(self.readers, timeout)
        if not ready:
            raise WaitTimeout(f"no replica had an item within {timeout:g} s", timeout=timeout or 0.0)
        for reader in ready:
            try:
                slot = reader.get(self._stream, timeout=_moment(self._stream))
            except WaitTimeout:
                continue  # another member of the group was faster
            except EndOfStream:
                self.readers.remove(reader)
                continue
            self.readers.append(self.readers.pop(self.readers.index(reader)))  # the others first, next time
            number, previous, *nothing = slot.meta.pop(ORDER)
            yield slot, Made(number, previous), not nothing

    def ready(self) -> bool:
        return False


class Ordered(_Several):
    """In the order of what the replicas made them of. Items are given back in that order too, whatever the stage does:
    everything up to its floor is over, and nothing behind."""

    def __init__(
        self, session: Session, readers: Sequence[Reader], stream: Any, port: Port, board: Board, floor: int
    ) -> None:
        super().__init__(session, readers, stream, port)
        self._board, self._floor = board, floor
        self._order = Order(port.last)
        self._again = port.last  # counted, and perhaps not given back before this stage was started again
        self._out: list[_Out] = []  # what was given out, in order

    def take(self, timeout: float | None) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            while (found := self._order.pop()) is not None:
                made, (slot, full) = found
                self._out.append(_Out(made, slot, full))
                if full:
                    return Item(slot, made)
                self._settle()
            try:
                for slot, made, full in self._arrived(None if until is None else max(0.0, until - time.monotonic())):
                    if not self._order.add(made, (slot, full)):
                        if full and made.number != self._again:
                            self._port.drop()
                        slot.release()
            except EndOfStream:
                if self._order.early:
                    told = f"the replicas have ended, and none said anything of the item after {self._order.after}"
                    raise InvalidState(told) from None
                raise

    def ready(self) -> bool:
        return self._order.next

    def finish(self, slot: Any, nbytes: int) -> None:
        for out in self._out:
            if out.made.number == slot.number:
                out.done, out.nbytes = True, nbytes
        self._settle()

    def _settle(self) -> None:
        while self._out and (self._out[0].done or not self._out[0].full):
            out = self._out.pop(0)
            if out.full:
                self._port.count(out.made.number, out.nbytes)
            else:
                self._port.passed(out.made.number)
            self._board[self._floor] = out.made.number
            out.slot.release()


@dataclass
class _Out:
    made: Made
    slot: Any
    full: bool
    done: bool = False
    nbytes: int = 0


class Unordered(_Several):
    """Whichever comes, for a replica that reads what replicas write: who reads its own items puts them in order.
    `nothing` is told of an item that there is nothing of."""

    def __init__(
        self,
        session: Session,
        readers: Sequence[Reader],
        stream: Any,
        port: Port,
        finished: Marks | Last,
        nothing: Callable[[Made], None],
    ) -> None:
        super().__init__(session, readers, stream, port)
        self._finished, self._nothing = finished, nothing

    def take(self, timeout: float | None) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            for slot, made, full in self._arrived(left):
                if made.number in self._finished:
                    self._port.drop()
                    slot.release()
                elif full:
                    return Item(slot, made)
                else:
                    self._nothing(made)
                    self._finished.add(made.number)
                    slot.release()

    def finish(self, slot: Any, nbytes: int) -> None:
        self._port.count(slot.number, nbytes)
        self._finished.add(slot.number)
        slot.release()


class Newest(_Several):
    """The newest of what the replicas have, for a stage whose policy is ``latest``."""

    _after = 0

    def take(self, timeout: float | None) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            newest: Item | None = None
            for slot, made, full in self._arrived(None if until is None else max(0.0, until - time.monotonic())):
                if full and made.number > max(self._after, newest.number if newest else 0):
                    if newest is not None:
                        newest.release()
                    newest = Item(slot, made)
                else:
                    slot.release()
            if newest is not None:
                self._after = newest.number
                return newest

    def finish(self, slot: Any, nbytes: int) -> None:
        self._port.count(slot.number, nbytes)
        slot.release()
