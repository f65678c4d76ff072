"""Channels and arrays: writers, their epochs, and readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from ipcsync import errors, wire

from . import names, pens
from .model import Done, DropReader, EndStream, JoinRing, NewEpoch, OpenCell, Session, SetPen, Thing

if TYPE_CHECKING:
    from .state import Call, State

JOINS = 8  # requests that a session may have under way when the broker dies, and get their answers


def _channel(state: State, session: Session, incarnation: int) -> Thing:
    thing = names.held(state, session, incarnation)
    if thing.kind != "channel":
        raise errors.InvalidArgument(f"{thing.name!r} is a shared {thing.kind}, no channel")
    return thing


def join_writer(state: State, call: Call, body: wire.JoinWriter) -> Struct | None:
    thing = _channel(state, call.session, body.incarnation)
    if thing.stream_ended:
        raise errors.InvalidState(f"the stream of {thing.name!r} has ended for good: create a new channel")
    if (thing.pen, thing.writer_request, thing.condemned) == (call.session.number, call.id, False):
        # Asked again: the broker that granted it did not live to answer.
        return wire.WriterReply(thing.event_info(), thing.epoch, state.facts.issued(thing.cell))
    if thing.pen and (thing.leaving or state.sessions[thing.pen].state != "live"):
        # Its writer is on its way out: it has let go but its last items are not complete, or it is dying but not gone,
        # and what it still writes must not land in what a new writer writes.
        key = ("pen", thing.incarnation)
        state.park(key, call, lambda: join_writer(state, call, body), lambda: pens.busy(state, thing))
        return None
    if thing.pen:
        raise pens.busy(state, thing)
    if not thing.condemned:
        pens.grant(state, call.session, thing)
        thing.writer_request = call.id
        return wire.WriterReply(thing.event_info(), thing.epoch, state.facts.issued(thing.cell))
    _begin_epoch(state, call, thing)
    return None


def _begin_epoch(state: State, call: Call, thing: Thing) -> None:
    quota = state.quotas.events
    if state.cells_used - len(state.free_cells) >= quota:
        raise errors.QuotaExceeded(f"all {quota} events are in use: let some go", resource="events", limit=quota)
    base, old = state.facts.highest_item(thing), thing.cell
    thing.cell = state.take_cell()
    thing.cells.append(thing.cell)
    state.by_cell[thing.cell] = thing.incarnation
    thing.epoch += 1
    thing.condemned = False
    thing.pen, thing.recorded, thing.leaving = call.session.number, True, False
    thing.writer_request = call.id
    state.mark(thing)
    state.do(OpenCell(thing.cell, thing.incarnation, base, thing.name))
    state.do(SetPen(thing.cell, call.session.block))

    def begun(done: Done) -> None:
        if done.error is not None:
            state.fail(call.peer, call.id, done.error)
        else:
            state.answer(call.peer, call.id, wire.WriterReply(thing.event_info(), thing.epoch, base))

    state.do(NewEpoch(thing, old, base), begun)


def leave_writer(state: State, call: Call, body: wire.LeaveWriter) -> wire.Empty:
    """The pen comes back when the last item is complete: until then a death still condemns what is not."""
    thing = _channel(state, call.session, body.incarnation)
    if thing.pen != call.session.number:
        return wire.Empty()
    if body.end and not thing.condemned:
        thing.stream_ended = body.end
        state.do(EndStream(thing, call.session, body.end))
    thing.leaving = True
    state.letting_go.add(thing.incarnation)
    state.mark(thing)
    pens.let_go(state, thing)
    return wire.Empty()


def join_reader(state: State, call: Call, body: wire.JoinReader) -> Struct | None:
    thing = names.held(state, call.session, body.incarnation)
    if thing.spec is None:
        raise errors.InvalidArgument(f"{thing.name!r} is an event: it has no readers")
    session = call.session
    before = session.joins.get(call.id)
    if before is not None and before[:2] in session.readers:
        return wire.ReaderReply(*before[1:])  # asked again: the broker that gave it did not live to answer

    def joined(done: Done) -> None:
        if done.error is not None:
            state.fail(call.peer, call.id, done.error)
            return
        reply: wire.ReaderReply = done.result
        session.readers.add((thing.incarnation, reply.cell))
        session.joins[call.id] = (thing.incarnation, reply.cell, reply.start)
        while len(session.joins) > JOINS:
            del session.joins[next(iter(session.joins))]
        state.mark(session)
        state.answer(call.peer, call.id, reply)

    state.do(JoinRing(thing, session, body), joined)
    return None


def leave_reader(state: State, call: Call, body: wire.LeaveReader) -> wire.Empty:
    place = (body.incarnation, body.cell)
    if place in call.session.readers:
        _drop(state, call.session, place)
    return wire.Empty()


def drop_readers(state: State, session: Session, thing: Thing) -> None:
    """The session detaches, so nothing of it reads this any more."""
    for place in [p for p in session.readers if p[0] == thing.incarnation]:
        _drop(state, session, place)


def _drop(state: State, session: Session, place: tuple[int, int]) -> None:
    session.readers.discard(place)
    state.mark(session)
    state.do(DropReader(state.things[place[0]], place[1], "left"))
