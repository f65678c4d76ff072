"""Waking only who sleeps: a futex whose writer makes no system call while nobody waits.

A bell is a word of shared memory: 0 while nobody sleeps, else a token, never used before, of whoever announced that it
will. A sleeper stores a token, or goes by the one that it finds; fences, looks once more at what it waits for, and
sleeps while the bell holds *that* token. Who changes what is waited for does that first and then looks at the bell: if
it is not 0, stores 0 and wakes everybody.

Both sides write the bell, so a store may overwrite another's. Every such case ends in a look and not in a sleep: a
token that was overwritten, by 0 or by another's, lets nobody fall asleep who went by it; they announce themselves
again. A sleeper whose token stood when it fell asleep is woken by whoever stores 0 after that. And a writer that read 0
had not seen the token yet, so the sleeper's fence (docs/design/ledger.md, rule 2: the slow side pays) shows it what
that writer had stored. That is why a token is not used twice: it could be silenced and stored again between a look and
the sleep.
tests/unit/test_bells.py tries every interleaving on a model of the memory, and that each step is needed.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from . import linux

if TYPE_CHECKING:
    from .waiting import Words


_numbers = itertools.count()


def announce(region: Words, bell: int) -> int:
    """Says that this thread is about to sleep; returns the token. What it waits for must be looked at after this."""
    token = region.words[bell]
    if not token:
        # Not 0, and below 2^32: a pid is below 2^22. The same again after 1,024 sleeps of this process, or from another
        # pid namespace: should it come between somebody's look and sleep, that costs a slice.
        token = region.words[bell] = os.getpid() << 10 | next(_numbers) & 1023
    linux.membarrier()
    return token


def sleep(region: Words, bell: int, token: int, seconds: float) -> None:
    """Sleeps while the bell holds `token`, for `seconds` at most; may return early."""
    linux.futex_wait(region.address + 8 * bell, token, seconds)


def ring(region: Words, bell: int) -> None:
    """Wakes whoever sleeps, if somebody does. What they wait for was stored before."""
    if region.words[bell]:
        toll(region, bell)


def toll(region: Words, bell: int) -> None:
    """Wakes all who sleep, and lets nobody fall asleep who has not looked again. Needs no fence of the sleepers, so a
    process may do it that is not registered for membarrier."""
    region.words[bell] = 0
    linux.futex_wake(region.address + 8 * bell)
