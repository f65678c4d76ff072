"""What the ledger stands on (docs/design/ledger.md), tried between two processes: whole words, store-then-load, futex,
the robust word of a killed process."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import linux
from .doctor_probe import FAILS, OK, WARNING, Finding, start
from .shm import Region

_ROUNDS = 20_000
_PATTERNS = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
_STOP, _WORD, _READY = 0, 8, 16
_MINE, _DONE, _SEEN = (24, 32), (40, 48), 64  # of either side; what the child saw, by round


@contextmanager
def _page(nbytes: int = 4096) -> Iterator[Region]:
    region = Region.create(Path("/dev/shm") / f"ipcsync-doctor-{secrets.token_hex(6)}", nbytes)
    try:
        yield region
    finally:
        region.path.unlink()
        region.close()


def _until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the other process did not answer")


def whole_words() -> Finding:
    """One process stores two patterns in turn; the other must never read a mixture."""
    reads = torn = 0
    with _page() as region, start("litmus.store_patterns", str(region.path)) as child:
        words = region.words
        _until(lambda: bool(words[_READY]))
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            for _ in range(100):
                torn += words[_WORD] not in _PATTERNS
                reads += 1
        words[_STOP] = 1
        child.wait(10)
    if torn:
        return Finding(
            "", FAILS, f"{torn} of {reads} reads of a 64-bit word were torn", "this Python cannot run ipcsync"
        )
    return Finding("", OK, f"64-bit words are stored and loaded whole ({reads} reads)")


def store_patterns(path: str) -> None:
    words = Region.open(Path(path)).words
    words[_WORD] = _PATTERNS[0]
    words[_READY] = 1
    while not words[_STOP]:
        for _ in range(100):
            words[_WORD] = _PATTERNS[1]
            words[_WORD] = _PATTERNS[0]


def store_load() -> Finding:
    """Store mine, then load yours, on both sides at once; one side pays a membarrier. Both may never miss."""
    linux.membarrier_register()
    with _page(8 * (_SEEN + _ROUNDS + 1)) as region, start("litmus.announce", str(region.path)) as child:
        words = region.words
        _until(lambda: bool(words[_READY]))
        seen = [0] * (_ROUNDS + 1)
        for n in range(1, _ROUNDS + 1):
            words[_MINE[0]] = n
            linux.membarrier()
            seen[n] = words[_MINE[1]]
            words[_DONE[0]] = n
            _until(lambda n=n: words[_DONE[1]] >= n)  # type: ignore[misc]
        child.wait(10)
        theirs = words[_SEEN : _SEEN + _ROUNDS + 1].tolist()
    missed = sum(seen[n] < n and theirs[n] < n for n in range(1, _ROUNDS + 1))
    if missed:
        return Finding(
            "", FAILS, f"both sides missed the other's store in {missed} of {_ROUNDS} tries, despite membarrier",
            "the ledger's rules do not hold here: report the processor and the kernel",
        )  # fmt: skip
    return Finding("", OK, f"store-then-load is ordered by membarrier ({_ROUNDS} tries)")


def announce(path: str) -> None:
    linux.membarrier_register()
    words = Region.open(Path(path)).words
    words[_READY] = 1
    for n in range(1, _ROUNDS + 1):
        words[_MINE[1]] = n
        words[_SEEN + n] = words[_MINE[0]]
        words[_DONE[1]] = n
        _until(lambda n=n: words[_DONE[0]] >= n)  # type: ignore[misc]


def futex() -> Finding:
    """A sleeper in another process is woken by a store and a wake."""
    with _page() as region, start("litmus.sleep", str(region.path)) as child:
        words = region.words
        _until(lambda: bool(words[_READY]))
        time.sleep(0.05)
        began = time.monotonic()
        words[_WORD] = 1
        linux.futex_wake(region.address + 8 * _WORD)
        child.wait(15)
        took = time.monotonic() - began
    if took > 5:
        return Finding("", FAILS, "a futex wake did not reach another process", "both must see the same /dev/shm")
    return Finding("", OK, "futexes wake other processes")


def sleep(path: str) -> None:
    region = Region.open(Path(path))
    region.words[_READY] = 1
    while not region.words[_WORD]:
        linux.futex_wait(region.address + 8 * _WORD, 0, 10.0)


def robust_word() -> Finding:
    """A killed process's robust mutex reads as such at once."""
    with _page() as region, start("litmus.hold", str(region.path)) as child:
        words = region.words
        _until(lambda: bool(words[_READY]))
        began = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        try:
            _until(lambda: bool(words[_WORD] & linux.OWNER_DIED), 5.0)
        except TimeoutError:
            return Finding(
                "", FAILS, "a killed process's robust mutex does not say so",
                "this kernel or sandbox does not support robust futexes: deaths would be seen late or never",
            )  # fmt: skip
        took = time.monotonic() - began
        child.wait(10)
    status = OK if took < 0.1 else WARNING
    return Finding("", status, f"a killed process is seen after {1e3 * took:.1f} ms by its robust mutex")


def hold(path: str) -> None:
    region = Region.open(Path(path))
    linux.robust_lock(region.address + 8 * _WORD)
    region.words[_READY] = 1
    time.sleep(60)
