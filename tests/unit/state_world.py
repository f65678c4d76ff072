"""A world for the broker's decisions: a fake clock, processes, cells and readers, all plain Python."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from ipcsync import errors, ledger, wire
from ipcsync_broker import journal, model, recovery
from ipcsync_broker.model import (
    Announce,
    Answer,
    Build,
    Built,
    CondemnCells,
    Do,
    Done,
    DropReader,
    Effect,
    FreeCell,
    Input,
    JoinRing,
    Leave,
    OpenCell,
    Persist,
    Quotas,
    Received,
    Session,
    SetBlock,
    SetPen,
    Thing,
    Tick,
    Watch,
)  # fmt: skip
from ipcsync_broker.state import State

UID, NAMESPACE = 1000, 4026531836
EVENT = wire.CreateEvent("e", "cpu")
SPEC = wire.ChannelSpec(fields=(wire.FieldSpec("array", (4,), "uint8"),), stride=256, depth=2, max_readers=2)


class Cell:
    def __init__(self, incarnation: int, base: int, mirror: bool) -> None:
        self.incarnation, self.mirror = incarnation, mirror
        self.issued = self.completed = base
        self.verdict = ledger.FOREVER
        self.pen: int | None = None


class Killed(Exception):
    """The broker died here."""


class World:
    """Facts for the state, and its outputs carried out. ``answers[peer]`` are the replies as they came."""

    def __init__(self, quotas: Quotas | None = None, linger: float | None = None) -> None:
        self.now = 0.0
        self.requests = 0
        self.processes: dict[int, tuple[str, int, int]] = {}
        self.cells: dict[int, Cell] = {}
        self.dead_blocks: set[int] = set()
        self.closed_blocks: set[int] = set()
        self.holders: dict[str, int | None] = {}  # who holds a session's file locked
        self.stopped: set[str] = set()  # whose heartbeats are not answered
        self.waits: set[int] = set()  # blocks with device waits outstanding
        self.blocks: dict[int, str] = {}
        self.beats: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.places: set[tuple[int, int]] = set()  # reader cells that are not free
        self.ended: set[int] = set()  # streams
        self.watched: set[int] = set()
        self.built: set[int] = set()
        self.held_builds: list[Do] | None = None  # a list: builds wait in it, as on the worker thread
        self.build_error: Exception | None = None
        self.answers: dict[bytes, deque[Answer]] = {}
        self.announced: list[Announce] = []
        self.journal: journal.Entities = {}
        self.order: list[str] = []
        self.kill_in: int | None = None  # the broker dies after so many outputs more
        self.left = False
        self.quotas, self.linger = quotas or Quotas(sessions=8, events=8), linger
        self.state = self._state()

    def _state(self) -> State:
        return State(
            boot=b"b" * 16,
            facts=self,
            uids=frozenset({UID}),
            pid_namespace=NAMESPACE,
            now=self.now,
            quotas=self.quotas,
            linger=self.linger,
            version="test",
        )

    def restart(self, lost: set[int] | None = None) -> None:
        """The broker is killed between two turns, and another takes over what the journal and the ledger say."""
        self.held_builds, self.watched, self.announced, self.kill_in = None, set(), [], None
        self.answers.clear()
        last = (self.state.last_session, self.state.last_incarnation)
        used = max(self.cells, default=-1) + 1
        self.state = self._state()
        records: journal.Entities = {}
        journal.enter(records, journal.dumps(self.journal, journal.Last()))
        known = [record for record in records.values() if isinstance(record, Session)]
        things = [record for record in records.values() if isinstance(record, Thing)]
        self.built &= {thing.incarnation for thing in things}
        recovery.adopt(self.state, known, things, last=last, cells_used=used)
        self.feed(model.Recover(lost or set()))

    # -- facts

    def issued(self, cell: int) -> int:
        return self.cells[cell].issued

    def drained(self, cell: int) -> bool:
        return self.cells[cell].completed >= self.cells[cell].issued

    def verdict(self, cell: int) -> int:
        return self.cells[cell].verdict

    def block_session(self, block: int) -> int:
        return self.owners[block] if self.blocks.get(block, "free") != "free" else 0

    def closed(self, block: int) -> bool:
        return block in self.closed_blocks

    def opened(self, thing: Thing) -> bool:
        return thing.cell in self.cells and self.cells[thing.cell].incarnation == thing.incarnation

    def held(self, thing: Thing) -> bool:
        return True

    def readers(self, thing: Thing) -> set[int]:
        return {cell for incarnation, cell in self.places if incarnation == thing.incarnation}

    def stream_open(self, thing: Thing) -> bool:
        return thing.incarnation not in self.ended

    def highest_item(self, thing: Thing) -> int:
        return self.cells[thing.cell].issued

    def dying(self, block: int) -> bool:
        return block in self.dead_blocks

    def beat(self, block: int) -> int:
        return self.beats.get(block, 0)

    def waiting(self, block: int) -> bool:
        return block in self.waits

    def holder(self, lock: str) -> int | None:
        return self.holders.get(lock, 0)

    def silent(self, lock: str) -> bool:
        return lock in self.stopped

    def process(self, pid: int) -> tuple[str, int, int] | None:
        return self.processes.get(pid)

    # -- what a client does

    def start(self, pid: int) -> None:
        self.processes[pid] = ("S", pid * 10, UID)

    def hello(self, peer: bytes, pid: int, /, **changed: Any) -> wire.Welcome | wire.Failure:
        if pid not in self.processes:
            self.start(pid)
        fields: dict[str, Any] = {
            "protocol_min": 1, "protocol_max": 1, "layout": ledger.LAYOUT, "version": "test", "name": peer.decode(),
            "namespace": "default", "pid": pid, "start": pid * 10, "boot_id": "b", "pid_namespace": NAMESPACE,
            "uid": UID,
        }  # fmt: skip
        return self.call(peer, "hello", wire.Hello(**{**fields, **changed}))

    def send(
        self, peer: bytes, op: str, body: msgspec.Struct, left: float | None = 5.0, v: int = 1, id: int = 0
    ) -> None:
        plain = msgspec.to_builtins(body, builtin_types=(bytes,))
        self.requests += 1
        self.feed(Received(peer, wire.Request(v, id or 1000 + self.requests, op, plain, left)))

    def ask(self, peer: bytes, op: str, body: msgspec.Struct, id: int) -> Any:
        """A call with a request number of its own."""
        self.send(peer, op, body, id=id)
        return self.answer(peer, op)

    def answer(self, peer: bytes, op: str) -> Any:
        """The next reply, typed; None when there is none (yet)."""
        got = self.answers.get(peer)
        if not got:
            return None
        answer = got.popleft()
        if answer.error is not None:
            return answer.error
        kind = wire.OPS[op][1]
        return answer.body if kind is None else wire.convert(answer.body, kind)

    def call(self, peer: bytes, op: str, body: msgspec.Struct, left: float | None = 5.0) -> Any:
        self.send(peer, op, body, left)
        return self.answer(peer, op)

    def kill(self, number: int, *, gone: bool = True) -> None:
        session = self.state.sessions[number]
        self.dead_blocks.add(session.block)
        self.feed(model.Dying(number))
        if gone:
            self.processes.pop(session.pid, None)
            self.feed(model.Gone(number))

    def tick(self, seconds: float = 0.02) -> None:
        """Time passes in the broker's turns."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(until, self.now + 0.02)
            self.feed(Tick())

    # -- carrying out

    def feed(self, item: Input) -> None:
        following: deque[Input] = deque([item])
        while following:
            outputs = self.state.handle(following.popleft(), self.now)
            kinds = [isinstance(output, Persist) for output in outputs]
            assert kinds == sorted(kinds, reverse=True), "the journal comes first"
            for output in outputs:
                self.order.append(type(output).__name__)
                if self.kill_in is not None:
                    if self.kill_in == 0:
                        raise Killed
                    self.kill_in -= 1
                done = self._carry_out(output)
                if done is not None:
                    following.append(done)

    def finish_builds(self) -> None:
        held, self.held_builds = self.held_builds or [], None
        for job in held:
            self.feed(self._apply(job))

    def _carry_out(self, output: model.Output) -> Input | None:
        match output:
            case Answer():
                self.answers.setdefault(output.peer, deque()).append(output)
            case Announce():
                self.announced.append(output)
            case Persist(changes):
                journal.enter(self.journal, journal.dumps(changes, journal.Last()))
            case Watch(number, on):
                (self.watched.add if on else self.watched.discard)(number)
            case model.Next(item):
                return item
            case Leave():
                self.left = True
            case Do(effect, token):
                if isinstance(effect, Build) and self.held_builds is not None:
                    self.held_builds.append(output)
                    return None
                done = self._apply(output)
                return done if token else None
        return None

    def _apply(self, job: Do) -> Done:
        try:
            return Done(job.token, self._effect(job.effect))
        except errors.IpcSyncError as error:
            return Done(job.token, None, error)

    def _effect(self, effect: Effect) -> Any:
        match effect:
            case OpenCell(cell, incarnation, base, _, mirror):
                assert cell not in self.cells, "a cell that is in use was given away"
                self.cells[cell] = Cell(incarnation, base, mirror)
            case FreeCell(cell):
                self.cells.pop(cell, None)
            case SetPen(cell, block):
                self.cells[cell].pen = block
            case SetBlock(block, state, session):
                if state == "live":
                    assert session is not None
                    self.owners[block] = session.number
                    assert self.blocks.get(block, "free") == "free"
                    self.dead_blocks.discard(block)
                if state != "leased":
                    self.blocks[block] = state
            case CondemnCells(cells):
                verdicts = {}
                for number in cells:
                    cell = self.cells[number]
                    if cell.verdict == ledger.FOREVER:
                        verdicts[number] = cell.verdict = cell.completed + 1
                    cell.completed = ledger.FOREVER  # released
                return verdicts
            case Build(thing):
                if self.build_error is not None:
                    raise self.build_error
                self.built.add(thing.incarnation)
                return Built(thing.via, b"", thing.memory or (wire.MemoryInfo(b"m", 512),))
            case model.Free(thing):
                self.built.discard(thing.incarnation)
            case JoinRing(thing, _, _):
                for cell in range(2):
                    if (thing.incarnation, cell) not in self.places:
                        self.places.add((thing.incarnation, cell))
                        return wire.ReaderReply(cell, 1)
                raise errors.QuotaExceeded("full", resource="readers", limit=2)
            case model.EndStream(thing):
                self.ended.add(thing.incarnation)
            case DropReader(thing, cell, how):
                if how in ("left", "gone"):
                    self.places.discard((thing.incarnation, cell))
        return None

    # -- what must always hold

    def check(self) -> None:
        """Invariants between the state's tables and the world."""
        state = self.state
        for number, session in state.sessions.items():
            assert session.number == number
            for incarnation in session.attached:
                assert number in state.things[incarnation].attached
            for incarnation, _ in session.readers:
                assert incarnation in session.attached
        owners: dict[int, int] = {}
        for incarnation, thing in state.things.items():
            assert thing.attached <= set(state.sessions)
            assert thing.attached or thing.named, f"nobody can reach {thing.name} any more, and it is still there"
            if thing.pen:
                assert thing.pen in state.sessions
                assert self.cells[thing.cell].pen == state.sessions[thing.pen].block
            else:
                assert self.cells[thing.cell].pen is None
            for cell in thing.cells:
                assert owners.setdefault(cell, incarnation) == incarnation
                assert self.cells[cell].incarnation in (incarnation, 0)
            if thing.ended:
                assert thing.condemned
                assert not thing.named
        for key, incarnation in state.names.items():
            named = state.things[incarnation]
            assert (named.namespace, named.name) == key
            assert named.named
        lapsed = {i for incarnations in state.lapsed.values() for i in incarnations}
        assert lapsed == {i for i, t in state.things.items() if t.ended}
        made = {i for mine in state.created_by.values() for i in mine}
        assert made == set(state.things) | {t.incarnation for t in state.building.values()}
        building = {t.cell for t in state.building.values()}
        assert set(self.cells) == set(owners), "cells leak"
        assert state.cells_used - len(state.free_cells) == len(owners) + len(building)
        assert len(state.free_blocks) + len(state.sessions) == state.quotas.sessions
        assert {b for b, s in self.blocks.items() if s != "free"} == {s.block for s in state.sessions.values()}
        assert self.watched == set(state.sessions)
        assert self.places == {place for s in state.sessions.values() for place in s.readers}
        if self.held_builds is None:
            with_storage = {i for i, t in state.things.items() if t.kind != "event" or t.device != "cpu"}
            assert self.built >= with_storage
            assert self.built <= set(state.things)
        assert set(self.journal) == {("session", n) for n in state.sessions} | {("thing", i) for i in state.things}
        for (kind, id), record in self.journal.items():
            now: Session | Thing = state.sessions[id] if kind == "session" else state.things[id]
            if isinstance(now, Session):
                now = msgspec.structs.replace(now, attached=set(), away=False)
            assert record == now, f"the journal's {kind} {id} is out of date"


def two(world: World) -> None:
    """Two sessions greet: ``b"a"`` of pid 11, and ``b"b"`` of pid 12."""
    assert isinstance(world.hello(b"a", 11), wire.Welcome)
    assert isinstance(world.hello(b"b", 12), wire.Welcome)


def channel(world: World) -> wire.ChannelInfo:
    made: wire.ChannelInfo = world.call(b"a", "create_channel", wire.CreateChannel("c", "cpu", SPEC))
    assert isinstance(world.call(b"b", "open_channel", wire.Open("channel", "c")), wire.ChannelInfo)
    return made


@pytest.fixture
def world() -> World:
    made = World()
    two(made)
    return made
