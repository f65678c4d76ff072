"""The picture that :mod:`ipcsync.why` follows, read from the ledger: it needs no broker, not even a living one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import linux
from .errors import IpcSyncError
from .host_waits import ISSUED, SEVERAL, announced
from .ledger import FOREVER, Block, Cell, Header, Ledger
from .overview import reader_load
from .ring import Control, Reader, open_control
from .why import DEVICE, NAME, Holder, Picture, Proc, ProcessState, Thing, Wait


def read(
    ledger: Ledger,
    *,
    names: Mapping[int, str] | None = None,
    status: Mapping[str, Any] | None = None,
    of_interest: Iterable[int] = (),
) -> Picture:
    """The picture as of now. `names` (by cell) and `status` (the broker's) know better than the ledger how things are
    called: it keeps the first 64 bytes of a name, and none of what is condemned. `of_interest`: cells whose readers
    are looked at, beside those that somebody waits for."""
    procs = {proc.block: proc for proc in _procs(ledger)}
    waits = tuple(w for block in procs for w in _waits(ledger, block))
    waits = tuple(_each(ledger, waits))
    for told in (status or {}).get("awaited", ()):
        waits += (Wait(told["block"], NAME, -1, 0, int(told["since"] * 1e9), told["name"]),)
    wanted = {wait.cell for wait in waits} | set(of_interest)
    things = {thing.cell: thing for thing in _things(ledger, names or {}, wanted)}
    for told in (status or {}).get("things", ()):
        cell = told["cell"]
        if cell in things:
            known = {"name": told["name"], "namespace": told["namespace"], "kind": told["kind"]}
            things[cell] = replace(things[cell], **known)
    return Picture(time.monotonic_ns(), procs, things, waits)


def _procs(ledger: Ledger) -> Iterator[Proc]:
    words = ledger.words
    for block in range(ledger.sessions):
        at = ledger.block(block)
        if words[at + Block.STATE] in (Block.LIVE, Block.DYING):
            name, pid = ledger.read_text(at + Block.NAME), int(words[at + Block.PID])
            yield Proc(block, int(words[at + Block.SESSION]), name, pid, _state(ledger, block, pid))


def _state(ledger: Ledger, block: int, pid: int) -> ProcessState:
    words, at = ledger.words, ledger.block(block)
    if ledger.dying(block):
        return "dead"
    if words[at + Block.LEASE]:
        return "silent"
    found = linux.process_state(pid)
    if found is None or found[1] != words[at + Block.START]:
        return "elsewhere"  # a dead one of ours would have left its mark on the life word
    return "stopped" if found[0] in "Tt" else "running"


def _waits(ledger: Ledger, block: int) -> Iterator[Wait]:
    for wait in announced(ledger, block):
        yield Wait(block, wait.kind, wait.cell, wait.round, wait.since)
    for cell, round in ledger.waits(block):
        at = ledger.cell(cell)
        if ledger.words[at + Cell.WORD] < round:  # entries of finished waits stay until their place is needed
            yield Wait(block, DEVICE, cell, round)


def _each(ledger: Ledger, waits: Iterable[Wait]) -> Iterator[Wait]:
    """A wait for any of several channels as one for each of them."""
    several: dict[int, Wait] = {}  # by block
    for wait in waits:
        if wait.kind != SEVERAL:
            yield wait
        elif several.setdefault(wait.block, wait) is not wait and wait.since:
            several[wait.block] = min(wait, several[wait.block], key=lambda w: w.since or 0)
    for path in Path(ledger.region.path).parent.glob("ctl-*") if several else ():
        try:
            control = open_control(path)
        except (OSError, IpcSyncError):
            continue  # it goes away meanwhile
        try:
            for block, item in _awaited(control):
                if block in several:
                    yield Wait(block, ISSUED, control.event_cell, item, several[block].since, several=True)
        finally:
            control.region.close()


def _awaited(control: Control) -> Iterator[tuple[int, int]]:
    """(block, item) of the readers that wait for this channel among several."""
    words = control.words
    for cell in range(control.max_readers if control.depth else 0):
        at = control.reader(cell)
        if words[at + Reader.STATE] == Reader.ACTIVE and (item := int(words[at + Reader.AWAITED])):
            yield int(words[at + Reader.OWNER]) - 1, item


def _things(ledger: Ledger, names: Mapping[int, str], wanted: set[int]) -> Iterator[Thing]:
    words = ledger.words
    folder = Path(ledger.region.path).parent
    for cell in range(words[Header.CELLS_USED]):
        at = ledger.cell(cell)
        if words[at + Cell.STATE] != Cell.LIVE and cell not in wanted:
            continue
        text, verdict = ledger.read_text(at + Cell.NAME), words[at + Cell.VERDICT]
        name = names.get(cell) or (text if verdict == FOREVER and text else f"cell {cell}")
        recorder = int(words[at + Cell.RECORDER]) - 1
        thing = Thing(
            cell,
            name,
            recorder=None if recorder < 0 else recorder,
            issued=int(words[at + Cell.ISSUED]),
            completed=ledger.completed(cell),
            verdict=None if verdict == FOREVER else int(verdict),
        )
        # Whose readers hold what is of interest only where somebody waits.
        yield _with_readers(thing, folder / f"ctl-{words[at + Cell.INCARNATION]}") if cell in wanted else thing


def _with_readers(thing: Thing, path: Path) -> Thing:
    """The same; a thing with a control file is a channel or an array, and has readers."""
    try:
        control = open_control(path)
    except (OSError, IpcSyncError):
        return thing  # an event has none, and others may go away meanwhile
    try:
        kind: Any = "channel" if control.depth else "array"
        return replace(thing, kind=kind, holders=tuple(_holders(control, thing)))
    finally:
        control.region.close()


def _holders(control: Control, thing: Thing) -> Iterator[Holder]:
    words = control.words
    for cell in range(control.max_readers):
        at = control.reader(cell)
        if words[at + Reader.STATE] == Reader.FREE:
            continue
        held, behind = reader_load(control, at, thing.issued)
        if held or behind:
            yield Holder(int(words[at + Reader.OWNER]) - 1, held, behind)
