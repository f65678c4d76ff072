"""Who may record, and what happens to rounds whose recorder will not complete them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipcsync import errors, wire
from ipcsync.ledger import Cell

from . import names
from .model import CondemnCells, Done, Mirror, RetireCell, Session, SetPen, Thing

if TYPE_CHECKING:
    from .state import Call, State

REASONS = {
    Cell.DIED: "died",
    Cell.FAILED: "failed",
    Cell.CONDEMNED_BY_OPERATOR: "operator",
    Cell.RESOURCE_LOST: "lost",
    Cell.SILENT: "silent",
}


def pen(state: State, call: Call, body: wire.Pen) -> wire.PenReply:
    thing = names.held(state, call.session, body.incarnation)
    if thing.kind == "channel":
        raise errors.InvalidArgument(f"{thing.name!r} is a channel: its pen comes with writer()")
    grant(state, call.session, thing)
    return wire.PenReply(state.facts.issued(thing.cell))


def grant(state: State, session: Session, thing: Thing) -> None:
    """Makes the session the recorder, or says who is."""
    if thing.ended or thing.condemned:
        raise errors.StaleHandle(f"{thing.name!r} was condemned: create or open the name anew", name=thing.name)
    if thing.pen not in (0, session.number):
        raise busy(state, thing)
    thing.pen, thing.recorded, thing.leaving = session.number, True, False
    state.letting_go.discard(thing.incarnation)
    state.mark(thing)
    state.do(SetPen(thing.cell, session.block))


def busy(state: State, thing: Thing) -> errors.RecorderBusy:
    other = state.sessions[thing.pen]
    return errors.RecorderBusy(
        f"session {other.label} records {thing.name!r}: one at a time, until it releases it, closes or dies",
        session=other.name,
        pid=other.pid,
        name=thing.name,
    )


def pen_back(state: State, call: Call, body: wire.PenBack) -> wire.Empty:
    thing = names.held(state, call.session, body.incarnation)
    if thing.pen == call.session.number:
        if not state.facts.drained(thing.cell):
            raise errors.InvalidState(f"rounds of {thing.name!r} are not complete yet: wait for them, then let go")
        drop(state, thing)
    return wire.Empty()


def drop(state: State, thing: Thing) -> None:
    """Nobody records it now."""
    thing.pen, thing.leaving = 0, False
    state.letting_go.discard(thing.incarnation)
    state.mark(thing)
    state.do(SetPen(thing.cell, None))
    state.unpark(("pen", thing.incarnation))


def let_go(state: State, thing: Thing) -> None:
    """Drops a pen that its session let go, once what it recorded is complete. Not before, not even when it was
    condemned: should the session die first, its words must still be released."""
    if state.facts.drained(thing.cell):
        drop(state, thing)


def mirror(state: State, call: Call, body: wire.MirrorEvent) -> wire.Empty:
    thing = names.held(state, call.session, body.incarnation)
    if not thing.handle:
        raise errors.InvalidArgument(f'{thing.name!r} has no CUDA event (via="{thing.via}")')
    state.do(Mirror(thing.cell))
    return wire.Empty()


# -- condemning


def condemn(state: State, call: Call, body: wire.Condemn) -> wire.Empty:
    if body.name is not None:
        incarnation = state.names.get((call.session.namespace, body.name))
        if incarnation is None:
            raise errors.NotFound(f"no {body.name!r} in namespace {call.session.namespace!r}", name=body.name)
        thing = state.things[incarnation]
        condemn_things(state, [thing], Cell.CONDEMNED_BY_OPERATOR, state.sessions.get(thing.pen))
        return wire.Empty()
    thing = names.held(state, call.session, body.incarnation)
    if thing.pen != call.session.number:
        raise errors.InvalidState(f"only its recorder condemns {thing.name!r} so: an operator does it by name")
    condemn_things(state, [thing], Cell.FAILED, call.session)
    return wire.Empty()


def condemn_things(state: State, things: list[Thing], cause: int, culprit: Session | None) -> None:
    """Those that have a verdict already (by a chain) keep it, but now their words are released as well."""
    for thing in things:
        thing.condemned = True
        state.mark(thing)
    if things:
        cells = [thing.cell for thing in things]
        state.do(CondemnCells(cells, cause, culprit), lambda done: condemned(state, done, cause, culprit))


def condemned(state: State, done: Done, cause: int, culprit: Session | None) -> None:
    """The verdicts are out, to the end of the chain."""
    verdicts: dict[int, int] = done.result or {}
    for cell, round in verdicts.items():
        thing = state.things.get(state.by_cell.get(cell, 0))
        if thing is not None and thing.cell == cell:
            ended(state, thing, round, REASONS[cause], culprit)


def ended(state: State, thing: Thing, round: int, reason: str, culprit: Session | None) -> None:
    """The thing's current epoch has a verdict: it is announced, and its name is free (a channel's stays)."""
    state.counts["condemned"] += 1
    thing.condemned = True
    state.mark(thing)
    state.do(RetireCell(thing.cell))
    state.announce(
        thing.namespace,
        "condemned",
        kind=thing.kind,
        name=thing.name,
        incarnation=thing.incarnation,
        cell=thing.cell,
        round=round,
        reason=reason,
        session=culprit.name if culprit else "",
        pid=culprit.pid if culprit else 0,
    )
    if thing.kind != "channel":
        names.lapse(state, thing)
    else:
        state.unpark(("pen", thing.incarnation))


def condemn_all(state: State, session: Session, cause: int) -> None:
    """The session is dead: what it records ends, and what it made and nobody ever recorded (else those who wait for
    its first round would wait for nobody)."""
    mine = [state.things[i] for i in session.attached if state.things[i].pen == session.number]
    made = [t for i in state.created_by.get(session.number, ()) if (t := state.things.get(i)) is not None]
    orphans = [t for t in made if not t.recorded and t.lifetime == "session"]
    condemn_things(state, mine + orphans, cause, session)


def give_back_all(state: State, session: Session) -> bool:
    """At a goodbye; whether something was left undone and had to be condemned."""
    undone = []
    for incarnation in session.attached:
        thing = state.things[incarnation]
        if thing.pen == session.number:
            if state.facts.drained(thing.cell):
                drop(state, thing)
            else:
                undone.append(thing)
    condemn_things(state, undone, Cell.DIED, session)
    return bool(undone)


def drop_all(state: State, session: Session) -> None:
    """The session has ended: no pen is its any more."""
    for incarnation in list(session.attached):
        thing = state.things[incarnation]
        if thing.pen == session.number:
            drop(state, thing)
