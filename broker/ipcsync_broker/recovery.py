"""A restarted broker's decisions: what it makes of the journal and of the ledger it finds.

The processes went on meanwhile: what they recorded is in the ledger, and one of them may even have condemned the dead
in the broker's stead. So the ledger's verdicts count, and the journal says whose they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ipcsync.ledger import FOREVER, Cell

from . import names, pens, sessions
from .model import DropReader, EndStream, FreeCell, Gone, Next, Session, SetBlock, SetPen, Thing, Watch

if TYPE_CHECKING:
    from .state import State

BACK_WITHIN = 5.0  # seconds in which sessions come back


def adopt(
    state: State, known: Iterable[Session], things: Iterable[Thing], last: tuple[int, int], cells_used: int
) -> None:
    """Fills the tables of a new state from the journal. No decisions yet: those are made by :func:`recover`."""
    for session in known:
        session.away = True
        state.sessions[session.number] = session
        state.heard[session.number] = state.now
    for thing in things:
        state.things[thing.incarnation] = thing
        for number in thing.attached:
            state.sessions[number].attached.add(thing.incarnation)
        state.created_by.setdefault(thing.creator, set()).add(thing.incarnation)
        for cell in thing.cells:
            state.by_cell[cell] = thing.incarnation
        key = (thing.namespace, thing.name)
        if thing.named:
            state.names[key] = thing.incarnation
        if thing.ended:
            state.lapsed.setdefault(key, set()).add(thing.incarnation)
        if thing.leaving:
            state.letting_go.add(thing.incarnation)
    state.last_session, state.last_incarnation = last
    taken = {session.block for session in state.sessions.values()}
    for block in taken:
        state.free_blocks.remove(block)
    state.cells_used = max(cells_used, 1 + max(state.by_cell, default=-1))
    state.free_cells = [cell for cell in range(state.cells_used) if cell not in state.by_cell]


def recover(state: State, lost: set[int]) -> None:
    """Makes ledger and tables agree, tells whoever must be told, and begins to wait for the living."""
    for cell in state.free_cells:
        state.do(FreeCell(cell))
    for block in state.free_blocks:
        state.do(SetBlock(block, "free", None))
    for session in list(state.sessions.values()):
        if state.facts.block_session(session.block) != session.number:
            sessions.end(state, session)  # it got no answer to its hello
        elif session.state != "live":
            state.do(SetBlock(session.block, "dying"))
    for thing in list(state.things.values()):
        if thing.incarnation not in lost:
            _finish(state, thing)
        _agree(state, thing)
    pens.condemn_things(
        state, [t for i in sorted(lost) if (t := state.things.get(i)) is not None], Cell.RESOURCE_LOST, None
    )
    for session in list(state.sessions.values()):
        state.out.append(Watch(session.number))
        if session.state == "dying":  # between its verdicts and their release, perhaps
            pens.condemn_all(state, session, Cell.DIED)
        elif session.state == "live" and state.facts.dying(session.block):
            sessions.die(state, session)
        if session.pid_namespace == state.pid_namespace:  # others: their files are looked at each tick
            found = state.facts.process(session.pid)
            if found is None or found[1] != session.start:
                state.out.append(Next(Gone(session.number)))
    for thing in list(state.things.values()):
        names.settle(state, thing)


def _finish(state: State, thing: Thing) -> None:
    """What was journalled and perhaps not carried out is done now, or was never promised to anybody and is undone."""
    if not thing.ended and not state.facts.opened(thing):
        if len(thing.cells) == 1:
            _undo(state, thing)
            return
        state.by_cell.pop(thing.cells.pop())
        thing.cell, thing.epoch = thing.cells[-1], thing.epoch - 1
        thing.condemned, thing.pen, thing.leaving = True, 0, False
        state.mark(thing)
    if thing.spec is None:
        return
    if thing.stream_ended and state.facts.stream_open(thing):
        state.do(EndStream(thing, state.sessions.get(thing.pen), thing.stream_ended))
    known = {
        cell for s in state.sessions.values() for incarnation, cell in s.readers if incarnation == thing.incarnation
    }
    for cell in state.facts.readers(thing) - known:
        state.do(DropReader(thing, cell, "gone"))


def _undo(state: State, thing: Thing) -> None:
    """Its creator got no answer: it never was."""
    thing.pen = 0
    names.unname(state, thing)
    for number in list(thing.attached):
        names.release(state, state.sessions[number], thing)
    names.settle(state, thing)


def _agree(state: State, thing: Thing) -> None:
    """The ledger's pen is what the tables say, the tables' verdict what the ledger says."""
    if thing.incarnation not in state.things:
        return
    pen = state.sessions.get(thing.pen)
    if thing.pen and pen is None:
        pens.drop(state, thing)
    else:
        state.do(SetPen(thing.cell, pen.block if pen else None))
    verdict = state.facts.verdict(thing.cell)
    if verdict != FOREVER and not thing.ended:
        pens.ended(state, thing, verdict, "died", pen)
    elif verdict == FOREVER and thing.condemned:
        pens.condemn_things(state, [thing], Cell.FAILED, pen)


def lose_everything(state: State) -> None:
    """The ledger cannot be served any more: whoever waits on it is told, and the broker leaves."""
    pens.condemn_things(state, list(state.things.values()), Cell.RESOURCE_LOST, None)
    state.stop()


def overdue(state: State, session: Session) -> bool:
    """A session that has not come back in time, and was closed while no broker was there to be told."""
    return session.away and state.now - state.started > BACK_WITHIN and state.facts.closed(session.block)
