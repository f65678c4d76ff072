"""How a host waits: a deadline, and sleeping until a word of shared memory has reached a value.

First a spin that yields the core: a peer that answers within microseconds is met without a sleep. Then a word
that a host writes is slept on by its futex: the writer always wakes. A GPU cannot wake a futex, so a word that a device
writes is polled, in naps of 50 us growing to 1 ms (5 % of a core at worst). Either way a sleep is a slice of at most
50 ms, and between slices `check` runs: it raises whatever ends the wait early (a verdict, a closed session), and is
where a waiter notices a death that no broker is there to see.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from . import bells, linux, trace
from .errors import InvalidArgument, WaitTimeout

if TYPE_CHECKING:
    from .host_waits import Waiting


class Unset(enum.Enum):
    """``UNSET``: no timeout was given, so the session's default holds; ``None`` is no deadline at all."""

    UNSET = "the session's default"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET
Timeout = float | None | Unset  # seconds

SLICE = 0.05
T = TypeVar("T")
# A peer answers within microseconds. It may want this very core, where the kernel likes to put who was just woken.
_LOOKS = range(3)


class Spin:
    """How often this process looks and yields its core before a wait sleeps, some 0.6 us each: more where sleeps turn
    out to be short, less where they are long, since to sleep and be woken costs more than most hand-offs take.

    On a crowded machine to yield is to lose the core for a slice of somebody else's, where who was woken gets it at
    once: then it does not spin at all for a while, longer each time.
    """

    LEAST, MOST = 16, 256
    SHORT, CROWDED = 100_000, 500_000  # nanoseconds: of a sleep, of a spin
    REST, LONG_REST = 64, 4096  # waits

    def __init__(self) -> None:
        self.yields = self.LEAST
        self._rest, self._left = self.REST, 0

    def begin(self) -> int:
        """How many yields this wait may spend."""
        if self._left:
            self._left -= 1
            return 0
        return self.yields

    def spun(self, nanoseconds: int) -> None:
        if nanoseconds > self.CROWDED:
            self.yields = self.LEAST
            self._left = self._rest
            self._rest = min(self.LONG_REST, 2 * self._rest)

    def slept(self, nanoseconds: int) -> None:
        """A wait was over after so long a sleep."""
        if self._left:
            return
        if nanoseconds < self.SHORT:
            self.yields = min(self.MOST, 2 * self.yields)
        else:
            self.yields = max(self.LEAST, self.yields // 2)


_spin = Spin()


class Words(Protocol):
    """Memory that can be waited on: 64-bit words, where they begin, and which of them have a bell. A ``Region``, or a
    process's own."""

    words: memoryview
    address: int
    bell_of: Callable[[int], int | None]


class Deadline:
    """A moment by which a host wait must have ended; ``Deadline(None)`` never comes."""

    __slots__ = ("at", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.at = None if timeout is None else time.monotonic() + timeout
        if self.at != self.at:  # NaN: no moment is later
            raise InvalidArgument("timeout is NaN: give seconds, or None for no deadline")

    def left(self, at_most: float = SLICE) -> float:
        """Seconds left, `at_most` that many; 0 when it has passed."""
        return at_most if self.at is None else max(0.0, min(at_most, self.at - time.monotonic()))


def spin(look: Callable[[], T | None]) -> T | None:
    """What `look` finds within the time that this process spins; None if it has to sleep."""
    yields, began, found = _spin.begin(), time.monotonic_ns(), None
    while yields > 0 and found is None:
        os.sched_yield()
        found = look()
        yields -= 4  # it takes longer than to look at a word
    _spin.spun(time.monotonic_ns() - began)
    return found


def slept(nanoseconds: int) -> None:
    """For who sleeps otherwise than in :func:`wait_word`: how long it was, so that the process learns from it."""
    _spin.slept(nanoseconds)


def wait_word(
    region: Words,
    index: int,
    target: int,
    deadline: Deadline,
    *,
    check: Callable[[], None],
    what: Callable[[], str],
    polled: bool = False,
    waiting: Callable[[], Waiting] | None = None,
) -> None:
    """Returns once word `index` of `region` is at least `target`. `WaitTimeout` names `what()` was waited for.

    `waiting` (``session.waits.host.of(...)``) lets others see a wait that takes long, and says who holds it up. It is
    called only for one that a first sleep did not end: a hand-off costs nothing.
    """
    words = region.words
    yields = _spin.begin()
    began = time.monotonic_ns()
    while True:
        for _ in _LOOKS:
            if words[index] >= target:
                _spin.spun(time.monotonic_ns() - began)
                return
        if not yields:
            break
        yields -= 1
        os.sched_yield()
    _spin.spun(time.monotonic_ns() - began)
    address = region.address + 8 * index
    nap = 50e-6
    told = waiting() if waiting is not None and trace.ACTIVE is not None else None
    slept, began = False, time.monotonic_ns()
    try:
        bell, began = region.bell_of(index), time.monotonic_ns()
        while words[index] < target:
            token = 0 if bell is None or polled else bells.announce(region, bell)
            check()
            seen = words[index]
            if seen >= target:
                break
            if slept and waiting is not None:
                if told is None:
                    told = waiting()
                    told.since = began
                told.still()
            left = deadline.left()
            if left == 0.0:
                raise WaitTimeout(f"{what()} did not come within {deadline.timeout:g} s", timeout=deadline.timeout)
            if polled:
                time.sleep(min(nap, left))
                nap = min(nap * 1.5, 1e-3)
            elif bell is not None:
                bells.sleep(region, bell, token, left)
            else:
                linux.futex_wait(address, seen, left)
            slept = True
    except BaseException as error:
        if told is None and waiting is not None and isinstance(error, WaitTimeout):
            told = waiting()
        if told is not None:
            told.over(error)
        raise
    if slept:
        _spin.slept(time.monotonic_ns() - began)
    if told is not None:
        told.over(None)
