"""What a broker finds in its runtime directory when it starts: nothing, or the ledger of one that died.

Only under the lock. The page is taken over if its journal can be read and names anybody; else whoever still has it
mapped is told that everything on it is lost, and a new one is made.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ipcsync import condemn, errors, guests, life, runtime
from ipcsync.backends import host_events
from ipcsync.ledger import Cell, Header, Ledger

from . import recovery
from .journal import Entities, Journal, Last
from .model import Quotas, Session, Thing
from .resources import Resources, failpoint
from .server import log
from .state import State

_OURS = re.compile(r"ledger|journal(\.new)?|broker\.sock|announce\.sock|pulse\.sock|(ctl|mem)-\d+|smem-\d+-.+")


@dataclass
class Page:
    ledger: Ledger
    journal: Journal
    quotas: Quotas
    taken_over: bool = False


def open_page(directory: Path, quotas: Quotas) -> Page:
    """The dead broker's page, any condemnation that it had begun now finished; or a new one."""
    path = directory / runtime.LEDGER
    found = _readable(path)
    if found is not None:
        inode = path.stat().st_ino
        entities, last = _entities(directory / runtime.JOURNAL, inode) or ({}, Last())
        if entities and _fits(entities, found):
            failpoint("broker.takeover")
            condemn.finish_begun(found, condemn.Culprit(Cell.DIED))
            limits = msgspec.structs.replace(quotas, sessions=found.sessions, events=found.events)
            return Page(found, Journal(directory / runtime.JOURNAL, inode, entities, last), limits, taken_over=True)
        _lose(found)
    sweep(directory)
    ledger = Ledger.create(path, sessions=quotas.sessions, events=quotas.events)
    return Page(ledger, Journal(directory / runtime.JOURNAL, path.stat().st_ino), quotas)


def _readable(path: Path) -> Ledger | None:
    try:
        return Ledger.open(path)
    except FileNotFoundError:
        return None
    except (errors.IpcSyncError, OSError, ValueError, IndexError) as error:
        log(f"the ledger that was here is of no use: {error}")
        return None


def _entities(path: Path, inode: int) -> tuple[Entities, Last] | None:
    try:
        return Journal.read(path, inode)
    except (ValueError, OSError) as error:  # msgspec's DecodeError is a ValueError
        log(f"the journal that was here is of no use: {error}")
        return None


def _fits(entities: Entities, ledger: Ledger) -> bool:
    """Whether the page has what the journal names, and nothing of it is given out twice."""
    sessions = [record for record in entities.values() if isinstance(record, Session)]
    things = [record for record in entities.values() if isinstance(record, Thing)]
    blocks, cells = [s.block for s in sessions], [cell for thing in things for cell in {thing.cell, *thing.cells}]
    numbers = {session.number for session in sessions}
    fits = (
        len(set(blocks)) == len(blocks)
        and len(set(cells)) == len(cells)
        and all(0 <= block < ledger.sessions for block in blocks)
        and all(0 <= cell < ledger.events for cell in cells)
        and all(thing.attached <= numbers for thing in things)
    )
    if not fits:
        log("the journal that was here is of no use: it does not fit its ledger")
    return fits


def _lose(ledger: Ledger) -> None:
    """Nobody knows any more whose the rounds on this page are: whoever waits for them is told."""
    words = ledger.words
    live = [c for c in range(words[Header.CELLS_USED]) if words[ledger.cell(c) + Cell.STATE] != Cell.FREE]
    if live:
        log(f"{len(live)} events of a broker that died cannot be taken over: they are condemned")
        condemn.condemn(ledger, live, condemn.Culprit(Cell.RESOURCE_LOST))
    ledger.region.close()


def reopen(page: Page, state: State, resources: Resources) -> set[int]:
    """Fills `state` from the journal and opens what it names; the incarnations that could not be opened."""
    records, last = page.journal.entities.values(), page.journal.last
    known = [record for record in records if isinstance(record, Session)]
    things = [record for record in records if isinstance(record, Thing)]
    used = page.ledger.words[Header.CELLS_USED]
    recovery.adopt(state, known, things, last=(last.session, last.incarnation), cells_used=used)
    lost = set()
    for thing in things:
        try:
            resources.reopen(thing)
        except (errors.IpcSyncError, OSError, ValueError, IndexError) as error:  # gone, cut short, scribbled over
            if thing.kind == "event" and thing.asked == "auto":
                thing.handle, thing.via = b"", "timeline"  # its rounds go on; its CUDA event cannot be had any more
                continue
            log(f"{thing.kind} {thing.name!r} is lost: {error}")
            lost.add(thing.incarnation)
    resources.retired()
    keep = {runtime.LEDGER, runtime.JOURNAL, *(t.control for t in things), *(f"mem-{t.incarnation}" for t in things)}
    sweep(resources.directory, keep, {f"smem-{s.number}-" for s in known})
    log(f"took over {len(known)} sessions and {len(things)} events, channels and arrays; {len(lost)} are lost")
    return lost


def sweep(directory: Path, keep: Container[str] = (), prefixes: set[str] | frozenset[str] = frozenset()) -> None:
    """Removes what a dead broker and its sessions left here. Only files of ours, or of our guests, by kind: somebody
    may keep other things in it."""
    uids = guests.listed(directory) | {os.getuid()}
    for path in directory.iterdir():
        found = path.lstat()
        kind = stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode)
        kept = path.name in keep or any(path.name.startswith(prefix) for prefix in prefixes)
        if kind and not kept and found.st_uid in uids and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
    host_events.sweep(directory)
    life.sweep(directory)
