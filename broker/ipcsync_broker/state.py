"""All decisions of the broker, with no I/O: ``State.handle(input, now)`` answers what is to be done.

What requests mean is in ``sessions.py`` (who is there, and who no longer), ``names.py`` (what exists), ``pens.py`` (who
may record) and ``rings.py`` (channels); this is what they share. Every change of a session or thing marks it, and the
journal's records of what was marked come before all other outputs of the same turn (LEDGER.md rule 12).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from ipcsync import errors, wire

from . import names, pens, recovery, rings, sessions
from .lateness import Lateness
from .model import (
    ALL_PARKED,
    LEASE,
    PARKED,
    Announce,
    Answer,
    Do,
    Done,
    Dying,
    Effect,
    Entity,
    Facts,
    FreeCell,
    Gone,
    Input,
    Leave,
    LedgerLost,
    Output,
    Persist,
    Quotas,
    Received,
    Recover,
    Session,
    Stop,
    Thing,
    Tick,
)  # fmt: skip

Key = tuple[str, str]  # (namespace, name)
TICK = 0.2  # seconds from one tick to the next, unless something is due before
STALL = 0.5  # a tick this late was the broker's own stall: nobody's silence


@dataclass
class Call:
    """A request under way: from whom, and until when an answer is of use (None: as long as it takes)."""

    peer: bytes
    id: int
    until: float | None
    session: Session


@dataclass
class Parked:
    """A call that waits for something to come true: tried again when `key` changes, failed when its time has passed."""

    key: object
    call: Call
    retry: Callable[[], Struct | None]
    expired: Callable[[], errors.IpcSyncError]
    since: float = 0.0


Handler = Callable[["State", Call, Any], Struct | None]  # None: the answer comes later

HANDLERS: dict[str, Handler] = {
    "bye": sessions.bye,
    "beat": sessions.beat,
    "suspect": sessions.suspect,
    "create_event": names.create_event,
    "create_channel": names.create_channel,
    "create_array": names.create_array,
    "open_event": names.open_("event"),
    "open_channel": names.open_("channel"),
    "open_array": names.open_("array"),
    "detach": names.detach,
    "unlink": names.unlink,
    "snapshot": names.snapshot,
    "pen": pens.pen,
    "pen_back": pens.pen_back,
    "mirror": pens.mirror,
    "condemn": pens.condemn,
    "join_writer": rings.join_writer,
    "leave_writer": rings.leave_writer,
    "join_reader": rings.join_reader,
    "leave_reader": rings.leave_reader,
}


class State:
    """`linger`: leave when the last session has ended. `uids`: whose processes may connect."""

    def __init__(
        self,
        *,
        boot: bytes,
        facts: Facts,
        uids: frozenset[int],
        pid_namespace: int,
        now: float,
        quotas: Quotas | None = None,
        linger: float | None = None,
        version: str = "",
        ledger: str = "ledger",
        announce: str = "",
        boot_id: str = "",
    ) -> None:
        self.boot, self.facts, self.uids, self.pid_namespace = boot, facts, uids, pid_namespace
        self.boot_id = boot_id  # of the kernel, where sessions must be too: they share memory
        self.quotas = quotas or Quotas()
        self.linger, self.version, self.ledger, self.announce_at = linger, version, ledger, announce
        self.now = self.started = self.turned = now
        self.seq = 0
        self.stopping = False
        self.served = False  # somebody said hello to this broker
        self.sessions: dict[int, Session] = {}
        self.things: dict[int, Thing] = {}
        self.names: dict[Key, int] = {}
        self.lapsed: dict[Key, set[int]] = {}  # condemned incarnations that somebody still holds
        self.created_by: dict[int, set[int]] = {}  # session -> incarnations that exist
        self.by_cell: dict[int, int] = {}
        self.peers: dict[bytes, int] = {}
        self.peer_of: dict[int, bytes] = {}
        self.heard: dict[int, float] = {}
        self.beats: dict[int, int] = {}  # session -> its BEAT word as last seen
        self.letting_go: set[int] = set()  # incarnations whose pen comes back when their rounds are complete
        self.building: dict[Key, Thing] = {}
        self.parked: list[Parked] = []
        self.counts: Counter[str] = Counter()
        self.lateness = Lateness()
        self.last_session = self.last_incarnation = 0
        self.free_blocks = deque(range(self.quotas.sessions))
        self.free_cells: list[int] = []
        self.cells_used = 0
        self.out: list[Output] = []
        self._marked: dict[Entity, None] = {}
        self._tokens: dict[int, Callable[[Done], None]] = {}
        self._last_token = 0
        self._next_tick = now

    # -- in and out

    def handle(self, item: Input, now: float) -> list[Output]:
        """What follows from `item`, in the order in which it must be done."""
        self.now, self.out = now, []
        match item:
            case Received():
                self._receive(item.peer, item.request)
            case Done():
                then = self._tokens.pop(item.token, None)
                if then is not None:
                    then(item)
            case Dying():
                if item.number in self.sessions:
                    sessions.die(self, self.sessions[item.number])
            case Gone():
                if item.number in self.sessions:
                    sessions.gone(self, self.sessions[item.number])
            case Tick():
                self._tick()
            case Recover():
                recovery.recover(self, item.lost)
            case LedgerLost():
                recovery.lose_everything(self)
            case Stop():
                self.stop()
        return self._journal() + self.out

    def _receive(self, peer: bytes, request: wire.Request) -> None:
        number = self.peers.get(peer)
        session = self.sessions.get(number) if number is not None else None
        if number is not None:
            self.heard[number] = self.now
        self.counts["requests"] += 1
        try:
            answer = self._dispatch(peer, request, session)
        except errors.IpcSyncError as error:
            if isinstance(error, errors.BadMessage):
                self.counts["bad_messages"] += 1
            self.fail(peer, request.id, error)
            return
        if answer is not None:
            self.answer(peer, request.id, answer)

    def _dispatch(self, peer: bytes, request: wire.Request, session: Session | None) -> Struct | None:
        if not wire.PROTOCOL_MIN <= request.v <= wire.PROTOCOL_MAX:
            raise errors.ProtocolMismatch(
                f"a message of protocol {request.v}; this broker ({self.version}) speaks {wire.PROTOCOL_MIN} to "
                f"{wire.PROTOCOL_MAX}: run versions of ipcsync that share one",
                theirs=request.v,
                ours=wire.PROTOCOL_MAX,
            )
        schema = wire.OPS.get(request.op)
        if schema is None:
            raise errors.BadMessage(f"no operation {request.op!r}")
        body = wire.convert(request.body, schema[0])
        if isinstance(body, wire.Hello):
            return sessions.hello(self, peer, body)
        if isinstance(body, wire.Status):
            self.out.append(Answer(peer, request.id, self.status()))  # for anybody of ours, without a session
            return None
        if session is None:
            raise errors.InvalidState("this broker does not know you: the first request is `hello`")
        if session.state != "live" and not isinstance(body, wire.Bye):
            raise errors.SessionClosed(
                f"session {session.label} was taken for dead (stopped for more than {LEASE:g} s, or its I/O "
                "thread is gone): its handles are stale, connect again"
            )
        until = None if request.left is None else self.now + request.left
        return HANDLERS[request.op](self, Call(peer, request.id, until, session), body)

    def answer(self, peer: bytes, id: int, reply: Struct) -> None:
        self.out.append(Answer(peer, id, msgspec.to_builtins(reply, builtin_types=(bytes,))))

    def fail(self, peer: bytes, id: int, error: Exception) -> None:
        if not isinstance(error, errors.IpcSyncError):
            error = errors.IpcSyncError(f"the broker failed: {type(error).__name__}: {error}")
        self.out.append(Answer(peer, id, None, wire.failure(error)))

    def announce(self, namespace: str, kind: Any, /, **body: Any) -> None:
        self.seq += 1
        self.out.append(Announce(namespace, kind, body, self.seq))

    def do(self, effect: Effect, then: Callable[[Done], None] | None = None) -> None:
        """Has an effect carried out; `then` gets its result, or what it raised."""
        token = 0
        if then is not None:
            self._last_token = token = self._last_token + 1
            self._tokens[token] = then
        self.out.append(Do(effect, token))

    # -- the journal

    def mark(self, entity: Session | Thing) -> None:
        """`entity` has changed, or is no more."""
        if isinstance(entity, Session):
            self._marked["session", entity.number] = None
        else:
            self._marked["thing", entity.incarnation] = None

    def _journal(self) -> list[Output]:
        if not self._marked:
            return []
        changes: dict[Entity, Session | Thing | None] = {}
        for kind, id in self._marked:
            changes[kind, id] = self.sessions.get(id) if kind == "session" else self.things.get(id)
        self._marked.clear()
        return [Persist(changes)]

    # -- parking

    def park(
        self, key: object, call: Call, retry: Callable[[], Struct | None], expired: Callable[[], errors.IpcSyncError]
    ) -> None:
        """``QuotaExceeded`` when too many wait already."""
        waiting = len(self.parked)
        mine = sum(p.call.session is call.session for p in self.parked) if waiting >= PARKED else 0
        if waiting >= ALL_PARKED or mine >= PARKED:
            limit = PARKED if mine >= PARKED else ALL_PARKED
            raise errors.QuotaExceeded(
                f"{limit} requests wait for something already: let some be answered first",
                resource="calls",
                limit=limit,
            )
        self.parked.append(Parked(key, call, retry, expired, self.now))

    def unpark(self, key: object) -> None:
        """What `key` stands for has changed: the calls parked under it are tried again."""
        ready = [p for p in self.parked if p.key == key]
        if not ready:
            return
        self.parked = [p for p in self.parked if p.key != key]
        for parked in ready:
            if parked.call.session.state != "live":
                continue
            try:
                answer = parked.retry()
            except errors.IpcSyncError as error:
                self.fail(parked.call.peer, parked.call.id, error)
                continue
            if answer is not None:
                self.answer(parked.call.peer, parked.call.id, answer)

    # -- cells

    def take_cell(self) -> int:
        """A free cell of the ledger; the caller has checked the quota."""
        if self.free_cells:
            return self.free_cells.pop()
        self.cells_used += 1
        return self.cells_used - 1

    def free_cell(self, cell: int) -> None:
        self.by_cell.pop(cell, None)
        self.free_cells.append(cell)
        self.do(FreeCell(cell))

    # -- the clock

    def due(self, now: float) -> bool:
        """Whether a tick would do anything now."""
        if now - self.turned >= TICK or self.letting_go:
            return True
        return any(p.call.until is not None and p.call.until <= now for p in self.parked)

    def _tick(self) -> None:
        late = self.now - self.turned
        if late > STALL:
            for number in self.heard:
                self.heard[number] += late
        self.turned = self.now
        for incarnation in list(self.letting_go):
            pens.let_go(self, self.things[incarnation])
        sessions.look_after(self)
        for parked in [p for p in self.parked if p.call.until is not None and p.call.until <= self.now]:
            self.parked.remove(parked)
            if parked.call.session.state == "live":
                self.fail(parked.call.peer, parked.call.id, parked.expired())
        if self.now >= self._next_tick:
            self._next_tick = self.now + 1.0
            self.announce("", "tick")
        lonely = self.linger is not None and not self.sessions
        if lonely and (self.served or self.now - self.started > (self.linger or 0.0)):
            self.stop()

    def stop(self) -> None:
        """Everybody is told, and the loop ends. What is attached goes on, as it would after our death."""
        if self.stopping:
            return
        self.stopping = True
        for session in list(self.sessions.values()):
            if sessions.is_gone(self, session):
                sessions.gone(self, session)
        for parked in self.parked:
            if parked.call.session.state == "live":
                self.fail(parked.call.peer, parked.call.id, errors.BrokerUnavailable("the broker is stopping"))
        self.parked.clear()
        self.announce("", "stopping")
        self.out.append(Leave())

    # -- what it says of itself

    def status(self) -> dict[str, Any]:
        """Free-form, for people and `ipcsync status --json`; lists end after 1,000 entries."""
        return {
            "version": self.version,
            "uptime": self.now - self.started,
            "seq": self.seq,
            "loop": self.lateness.told(),
            "counts": dict(self.counts),
            "quotas": msgspec.to_builtins(self.quotas),
            "sessions_total": len(self.sessions),
            "things_total": len(self.things),
            "parked": len(self.parked),
            "awaited": [
                {"block": p.call.session.block, "namespace": p.key[0], "name": p.key[1], "since": p.since}
                for p in self.parked[:1000]
                if isinstance(p.key, tuple) and isinstance(p.key[1], str)
            ],
            "cells_in_use": self.cells_used - len(self.free_cells),
            "bytes": sum(t.nbytes for t in self.things.values()),
            "sessions": [
                {
                    "session": s.number,
                    "block": s.block,
                    "name": s.name,
                    "namespace": s.namespace,
                    "pid": s.pid,
                    "state": s.state,
                    "lease_out": s.leased_out,
                    "attached": len(s.attached),
                    "readers": len(s.readers),
                    "silent": self.now - self.heard.get(s.number, self.now),
                }
                for s in list(self.sessions.values())[:1000]
            ],
            "things": [
                {
                    "kind": t.kind,
                    "namespace": t.namespace,
                    "name": t.name,
                    "incarnation": t.incarnation,
                    "cell": t.cell,
                    "device": t.device,
                    "via": t.via,
                    "attached": len(t.attached),
                    "pen": t.pen,
                    "named": t.named,
                    "ended": t.ended,
                    "condemned": t.condemned,
                    "bytes": t.nbytes,
                    "issued": self.facts.issued(t.cell),
                }
                for t in list(self.things.values())[:1000]
            ],
        }
