"""What exists: creating, opening, letting go, and when a thing's place may be used again."""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ipcsync import errors, wire
from ipcsync.dtypes import itemsize

from . import pens
from .model import Build, Built, Done, Free, OpenCell, Session, StaleCell, Thing

if TYPE_CHECKING:
    from .state import Call, Handler, Key, State


FEW = 256  # names


# -- creating


def create_event(state: State, call: Call, body: wire.CreateEvent) -> Struct | None:
    via: wire.Via = body.via
    if body.device == "cpu":
        if via == "cuda-event":
            raise errors.InvalidArgument('an event on "cpu" has no CUDA event: via="auto" or "timeline"')
        via = "timeline"
    thing = _new(state, call, "event", body.name, body.device, via, body.lifetime)
    thing.asked = body.via
    return _create(state, call, thing, body.exist_ok, build=via != "timeline")


def create_channel(state: State, call: Call, body: wire.CreateChannel) -> Struct | None:
    if (body.spec.memory == "session") != (body.memory is not None):
        raise errors.InvalidArgument('a channel with memory="session" brings its memory, another does not')
    for field in body.spec.fields:
        if field.offset + math.prod(field.shape) * itemsize(field.dtype) > body.spec.stride:
            raise errors.InvalidArgument(f"field {field.name!r} does not fit the {body.spec.stride} bytes of a buffer")
    thing = _new(state, call, "channel", body.name, body.device, "timeline", body.spec.lifetime)
    thing.channel = body.spec
    if body.memory is not None:
        thing.memory = (body.memory,)
    return _create(state, call, thing, body.exist_ok, build=True)


def create_array(state: State, call: Call, body: wire.CreateArray) -> Struct | None:
    if (body.spec.memory == "session") != bool(body.memory):
        raise errors.InvalidArgument('an array with memory="session" brings its memory, another does not')
    thing = _new(state, call, "array", body.name, body.device, "timeline", body.spec.lifetime)
    thing.array, thing.memory = body.spec, body.memory
    return _create(state, call, thing, body.exist_ok, build=True)


def _new(state: State, call: Call, kind: wire.Kind, name: str, device: str, via: wire.Via, lifetime: str) -> Thing:
    """Not yet in any table, and without a cell."""
    return Thing(
        kind=kind,
        namespace=call.session.namespace,
        name=name,
        incarnation=0,
        cell=-1,
        device=device,
        via=via,
        lifetime="broker" if lifetime == "broker" else "session",
        creator=call.session.number,
        request=call.id,
    )


def _create(state: State, call: Call, thing: Thing, exist_ok: bool, *, build: bool) -> Struct | None:
    key = (thing.namespace, thing.name)
    under_way = state.building.get(key)
    if under_way is not None and (exist_ok or _asked_again(call, under_way)):
        state.park(
            key,
            call,
            lambda: _create(state, call, thing, exist_ok, build=build),
            lambda: errors.NotFound(f"{thing.name!r} was still being created", name=thing.name),
        )
        return None
    existing = under_way or _named(state, key)
    if existing is not None:
        return _exists(state, call, thing, existing, exist_ok)
    _check_quotas(state, call.session, thing)
    thing.cell = state.take_cell()
    thing.cells = [thing.cell]
    state.last_incarnation += 1
    thing.incarnation = state.last_incarnation
    state.created_by.setdefault(thing.creator, set()).add(thing.incarnation)
    if not build:
        return _made(state, call, thing)
    state.building[key] = thing

    def built(done: Done) -> None:
        del state.building[key]
        if done.error is None:
            made: Built = done.result
            thing.via, thing.handle, thing.memory = made.via, made.handle, made.memory or thing.memory
        if done.error is not None or call.session.state != "live":
            state.do(Free(thing))
            _let_place_go(state, thing)
            if done.error is not None:
                state.fail(call.peer, call.id, done.error)
        else:
            state.answer(call.peer, call.id, _made(state, call, thing))
        state.unpark(key)

    state.do(Build(thing), built)
    return None


def _made(state: State, call: Call, thing: Thing) -> Struct:
    key = (thing.namespace, thing.name)
    state.things[thing.incarnation] = thing
    state.by_cell[thing.cell] = thing.incarnation
    state.names[key] = thing.incarnation
    for old in state.lapsed.get(key, ()):
        for cell in state.things[old].cells:
            state.do(StaleCell(cell))
    # Who waits on the CUDA event itself would pass one that nobody has recorded.
    state.do(OpenCell(thing.cell, thing.incarnation, name=thing.name, mirror=thing.via == "cuda-event"))
    _attach(state, call.session, thing)
    state.announce(thing.namespace, "created", **description(thing))
    state.unpark(key)
    return thing.info()


def description(thing: Thing) -> dict[str, object]:
    """The body of the "created" announcement."""
    return {"kind": thing.kind, **msgspec.to_builtins(thing.event_info(), builtin_types=(bytes,))}


def _asked_again(call: Call, thing: Thing) -> bool:
    """The very request that made it: what answers it counts once."""
    return (thing.creator, thing.request) == (call.session.number, call.id)


def _exists(state: State, call: Call, wanted: Thing, existing: Thing, exist_ok: bool) -> Struct:
    if _asked_again(call, existing) and existing.named:
        _attach(state, call.session, existing)
        return existing.info()  # asked again: the broker that made it did not live to answer
    if not exist_ok:
        raise errors.NameInUse(
            f"{wanted.name!r} exists in namespace {wanted.namespace!r}: open it, unlink it, or pass exist_ok=True",
            name=wanted.name,
        )
    differ = [
        what
        for what in ("kind", "device", "spec", "lifetime", "asked")
        if getattr(wanted, what) != getattr(existing, what)
    ]
    if wanted.spec is not None and wanted.spec.memory == "session":
        differ.append("memory (the other is the creator's own)")
    if differ:
        raise errors.NameInUse(
            f"{wanted.name!r} exists and differs in {', '.join(differ)}: open it, or choose another name",
            name=wanted.name,
        )
    _attach(state, call.session, existing)
    return existing.info()


def _check_quotas(state: State, session: Session, thing: Thing) -> None:
    quotas, mine = state.quotas, state.created_by.get(session.number, set())
    if state.cells_used - len(state.free_cells) >= quotas.events:
        raise _exceeded("events", quotas.events, "in all", "--max-events")
    if len(mine) >= quotas.session_events:
        raise _exceeded("events", quotas.session_events, "for one session", "--max-session-events")
    if thing.spec is None:
        return
    every = [t for t in (*state.things.values(), *state.building.values()) if t.spec is not None]
    own = [t for t in every if t.incarnation in mine]
    needed = thing.nbytes
    for things, channels, nbytes, scope, option in (
        (every, quotas.channels, quotas.nbytes, "in all", "--max"),
        (own, quotas.session_channels, quotas.session_nbytes, "for one session", "--max-session"),
    ):
        if len(things) >= channels:
            raise _exceeded("channels", channels, scope, f"{option}-channels")
        if nbytes is not None and sum(t.nbytes for t in things) + needed > nbytes:
            raise _exceeded("bytes", nbytes, scope, f"{option}-bytes")


def _exceeded(resource: str, limit: int, scope: str, option: str) -> errors.QuotaExceeded:
    return errors.QuotaExceeded(
        f"the broker allows {limit} {resource} {scope} and this would be more: let some go, or raise {option}",
        resource=resource,
        limit=limit,
    )


# -- opening


def open_(kind: wire.Kind) -> Handler:
    def handler(state: State, call: Call, body: wire.Open) -> Struct | None:
        if body.kind != kind:
            raise errors.BadMessage(f"open_{kind} for a {body.kind}")
        return _open(state, call, body)

    return handler


def _open(state: State, call: Call, body: wire.Open) -> Struct | None:
    key = (call.session.namespace, body.name)
    thing = _named(state, key)
    if thing is None:
        if call.until is not None and call.until <= state.now:
            raise _not_found(state, call, body)
        state.park(key, call, lambda: _open(state, call, body), lambda: _not_found(state, call, body))
        return None
    if thing.kind != body.kind:
        raise errors.InvalidArgument(f"{body.name!r} is a shared {thing.kind}: open it with open_{thing.kind}()")
    _attach(state, call.session, thing)
    return thing.info()


def _not_found(state: State, call: Call, body: wire.Open) -> errors.NotFound:
    namespace, near = call.session.namespace, list[str]()
    if len(state.names) <= FEW:  # looking for what is like it takes long among many
        near = get_close_matches(body.name, [name for space, name in state.names if space == namespace], n=1)
        near = near or [f"{body.name} in namespace {space}" for space, name in state.names if name == body.name]
    hint = f"did you mean {near[0]!r}?" if near else "is the process that creates it running, with the same namespace?"
    return errors.NotFound(
        f"no {body.kind} {body.name!r} appeared in namespace {namespace!r} in time: {hint}", name=body.name
    )


def _named(state: State, key: Key) -> Thing | None:
    incarnation = state.names.get(key)
    return None if incarnation is None else state.things[incarnation]


def _attach(state: State, session: Session, thing: Thing) -> None:
    if thing.incarnation not in session.attached:
        session.attached.add(thing.incarnation)
        thing.attached.add(session.number)
        state.mark(thing)


def held(state: State, session: Session, incarnation: int) -> Thing:
    """The thing a request is about; the session must have it open."""
    thing = state.things.get(incarnation)
    if thing is None or incarnation not in session.attached:
        raise errors.StaleHandle("this session does not have that open (any more): open the name again")
    return thing


# -- letting go


def detach(state: State, call: Call, body: wire.Detach) -> wire.Empty:
    thing = state.things.get(body.incarnation)
    if thing is not None and body.incarnation in call.session.attached:
        if thing.pen == call.session.number:
            if not state.facts.drained(thing.cell):
                raise errors.InvalidState(f"rounds of {thing.name!r} are not complete yet: wait for them, then let go")
            pens.drop(state, thing)
        release(state, call.session, thing)
    return wire.Empty()


def release(state: State, session: Session, thing: Thing) -> None:
    """The session holds it no longer, and none of its device work touches it."""
    from . import rings

    rings.drop_readers(state, session, thing)
    session.attached.discard(thing.incarnation)
    thing.attached.discard(session.number)
    state.mark(thing)
    settle(state, thing)


def unlink(state: State, call: Call, body: wire.Unlink) -> wire.Empty:
    """The name goes; whoever has it open keeps it."""
    thing = _named(state, (call.session.namespace, body.name))
    if thing is None:
        raise errors.NotFound(f"no {body.name!r} in namespace {call.session.namespace!r}", name=body.name)
    unname(state, thing)
    settle(state, thing)
    return wire.Empty()


def creator_ended(state: State, session: Session) -> None:
    """What the session created and nobody else has open loses its name; what lies in its memory does at once."""
    for incarnation in list(state.created_by.get(session.number, ())):
        thing = state.things.get(incarnation)
        if thing is None:  # still being built: let go when that is done
            continue
        thing.creator_ended = True
        state.mark(thing)
        if thing.spec is not None and thing.spec.memory == "session":
            unname(state, thing)
        settle(state, thing)


def unname(state: State, thing: Thing) -> None:
    if not thing.named:
        return
    thing.named = False
    key = (thing.namespace, thing.name)
    if state.names.get(key) == thing.incarnation:
        del state.names[key]
    state.mark(thing)
    state.announce(
        thing.namespace, "removed", kind=thing.kind, name=thing.name, incarnation=thing.incarnation, cell=thing.cell
    )


def lapse(state: State, thing: Thing) -> None:
    """It was condemned: its name is free, and whoever creates it anew makes the old handles stale."""
    unname(state, thing)
    thing.ended = True
    state.mark(thing)
    state.lapsed.setdefault((thing.namespace, thing.name), set()).add(thing.incarnation)
    settle(state, thing)


def settle(state: State, thing: Thing) -> None:
    """Frees what nobody has open and nobody can open."""
    if thing.attached or thing.incarnation not in state.things:
        return
    over = thing.lifetime == "session" and thing.creator_ended
    if over or not state.facts.held(thing):  # what a dead broker had made went with those who had it mapped
        unname(state, thing)
    if thing.named:
        return
    key = (thing.namespace, thing.name)
    lapsed = state.lapsed.get(key, set())
    lapsed.discard(thing.incarnation)
    if not lapsed:
        state.lapsed.pop(key, None)
    del state.things[thing.incarnation]
    state.letting_go.discard(thing.incarnation)
    state.do(Free(thing))
    _let_place_go(state, thing)
    state.mark(thing)


def _let_place_go(state: State, thing: Thing) -> None:
    mine = state.created_by[thing.creator]
    mine.discard(thing.incarnation)
    if not mine:
        del state.created_by[thing.creator]
    for cell in thing.cells:
        state.free_cell(cell)


# -- for late joiners


PAGE = 500


def snapshot(state: State, call: Call, body: wire.Snapshot) -> wire.SnapshotReply:
    """One page of the names in the session's namespace, in order."""
    later = sorted(n for space, n in state.names if space == call.session.namespace and n > body.after)
    created = [description(state.things[state.names[call.session.namespace, n]]) for n in later[:PAGE]]
    return wire.SnapshotReply(state.seq, created, len(later) > PAGE)
