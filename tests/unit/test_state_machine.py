"""Any sequence of requests, deaths, stops and ticks keeps the broker's tables, the ledger and the journal in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipcsync import wire
from ipcsync.ledger import FOREVER
from ipcsync_broker.model import Dying, Gone, Input, Quotas

from .state_world import SPEC, UID, Killed, World

names = st.sampled_from(["x", "y", "z"])
actors = st.integers(0, 4)
incarnations = st.integers(1, 6)


class Broker(RuleBasedStateMachine):
    """Five places for clients; each is a peer with a process, connected or not."""

    @initialize()
    def begin(self) -> None:
        self.world = World(Quotas(sessions=4, events=6, session_events=4, session_channels=2))
        self.peers: dict[int, tuple[bytes, int, int]] = {}  # place -> (peer, pid, session)
        self.births = 0
        for actor in range(3):
            self.hello(actor, UID)

    def guarded(self, act: Callable[[], Any]) -> Any:
        """A broker killed in the middle of its outputs is restarted, and its sessions come back."""
        try:
            return act()
        except Killed:
            self.world.restart()
            self.come_back(set(self.peers))
            return None

    def send(self, *arguments: Any) -> None:
        self.guarded(lambda: self.world.send(*arguments))

    def feed(self, item: Input) -> None:
        self.guarded(lambda: self.world.feed(item))

    def tick(self, seconds: float) -> None:
        self.guarded(lambda: self.world.tick(seconds))

    def hello_as(self, peer: bytes, pid: int, **changed: Any) -> Any:
        return self.guarded(lambda: self.world.hello(peer, pid, **changed))

    def peer(self, actor: int) -> bytes:
        return self.peers[actor][0] if actor in self.peers else b"stranger"

    @rule(actor=actors, uid=st.sampled_from([UID, UID, UID, 0]))
    def arrive(self, actor: int, uid: int) -> None:
        self.hello(actor, uid)

    def hello(self, actor: int, uid: int) -> None:
        if actor in self.peers:
            return
        self.births += 1
        peer, pid = f"p{self.births}".encode(), 100 + self.births
        found = self.hello_as(peer, pid, uid=uid)
        if isinstance(found, wire.Welcome):
            assert uid == UID
            self.peers[actor] = peer, pid, found.session

    @rule(actor=actors)
    def reconnect(self, actor: int) -> None:
        if actor in self.peers:
            peer, pid, number = self.peers[actor]
            self.births += 1
            again = f"{peer.decode()}r{self.births}".encode()
            found = self.hello_as(again, pid, session=number)
            if isinstance(found, wire.Welcome):
                self.peers[actor] = again, pid, found.session
                if not found.resumed:  # the old session of the same process was taken for dead; both exist for a while
                    self.send(again, "bye", wire.Bye())
                    del self.peers[actor]

    @rule(
        actor=actors, name=names, exist_ok=st.booleans(), lifetime=st.sampled_from(["session", "broker"]),
        device=st.sampled_from(["cpu", "GPU-1"]),
    )  # fmt: skip
    def create_event(self, actor: int, name: str, exist_ok: bool, lifetime: str, device: str) -> None:
        body = wire.CreateEvent(name, device, exist_ok=exist_ok, lifetime=lifetime)  # type: ignore[arg-type]
        self.send(self.peer(actor), "create_event", body)

    @rule(actor=actors, name=names, exist_ok=st.booleans())
    def create_channel(self, actor: int, name: str, exist_ok: bool) -> None:
        self.send(self.peer(actor), "create_channel", wire.CreateChannel(name, "cpu", SPEC, exist_ok))

    @rule(actor=actors, name=names, kind=st.sampled_from(["event", "channel"]))
    def open(self, actor: int, name: str, kind: str) -> None:
        self.send(self.peer(actor), f"open_{kind}", wire.Open(kind, name), 0.1)  # type: ignore[arg-type]

    @rule(actor=actors, incarnation=incarnations, op=st.sampled_from(["detach", "pen", "pen_back", "mirror"]))
    def about_a_thing(self, actor: int, incarnation: int, op: str) -> None:
        self.send(self.peer(actor), op, wire.OPS[op][0](incarnation))

    @rule(actor=actors, incarnation=incarnations, end=st.sampled_from(["", "closed", "failed"]))
    def leave_writer(self, actor: int, incarnation: int, end: str) -> None:
        self.send(self.peer(actor), "leave_writer", wire.LeaveWriter(incarnation, end))  # type: ignore[arg-type]

    @rule(actor=actors, incarnation=incarnations, op=st.sampled_from(["join_writer", "join_reader"]))
    def join(self, actor: int, incarnation: int, op: str) -> None:
        self.send(self.peer(actor), op, wire.OPS[op][0](incarnation), 0.1)

    @rule(actor=actors, incarnation=incarnations, cell=st.integers(0, 1))
    def leave_reader(self, actor: int, incarnation: int, cell: int) -> None:
        self.send(self.peer(actor), "leave_reader", wire.LeaveReader(incarnation, cell))

    @rule(actor=actors, incarnation=st.integers(0, 6), name=st.none() | names)
    def condemn(self, actor: int, incarnation: int, name: str | None) -> None:
        self.send(self.peer(actor), "condemn", wire.Condemn(incarnation, name))

    @rule(actor=actors, name=names)
    def unlink(self, actor: int, name: str) -> None:
        self.send(self.peer(actor), "unlink", wire.Unlink(name))

    @rule(incarnation=incarnations)
    def record(self, incarnation: int) -> None:
        thing = self.world.state.things.get(incarnation)
        if thing is not None and thing.pen and incarnation not in self.world.state.letting_go:
            self.world.cells[thing.cell].issued += 1

    @rule(incarnation=incarnations)
    def complete(self, incarnation: int) -> None:
        thing = self.world.state.things.get(incarnation)
        if thing is not None:
            cell = self.world.cells[thing.cell]
            cell.completed = min(cell.issued, cell.completed + 1)

    @rule(actor=actors)
    def bye(self, actor: int) -> None:
        if actor in self.peers:
            peer, _, _ = self.peers.pop(actor)
            self.send(peer, "bye", wire.Bye())

    @rule(actor=actors, how=st.sampled_from(["dying", "gone", "stopped"]))
    def end(self, actor: int, how: str) -> None:
        if actor not in self.peers:
            return
        _, pid, number = self.peers[actor]
        if how == "stopped":
            self.world.processes[pid] = ("T", pid * 10, UID)
            self.tick(4.0)
            return
        del self.peers[actor]
        if number in self.world.state.sessions:
            self.world.dead_blocks.add(self.world.state.sessions[number].block)
        self.feed(Dying(number))
        if how == "gone":
            self.world.processes.pop(pid, None)
            self.feed(Gone(number))

    @rule(lost=st.sets(incarnations, max_size=1), comes_back=st.sets(actors))
    def restart(self, lost: set[int], comes_back: set[int]) -> None:
        self.world.restart(lost)
        self.come_back(comes_back)

    def come_back(self, who: set[int]) -> None:
        for actor in who & set(self.peers):
            _, pid, number = self.peers[actor]
            self.births += 1
            peer = f"n{self.births}".encode()
            found = self.hello_as(peer, pid, session=number)
            if isinstance(found, wire.Welcome):
                self.peers[actor] = peer, pid, found.session

    @rule(after=st.integers(0, 12))
    def the_broker_will_be_killed(self, after: int) -> None:
        self.world.kill_in = after

    @precondition(lambda self: self.world.held_builds is None)
    @rule()
    def builds_take_long(self) -> None:
        self.world.held_builds = []

    @rule()
    def builds_are_done(self) -> None:
        self.guarded(self.world.finish_builds)

    @rule(seconds=st.sampled_from([0.02, 0.2]))
    def time_passes(self, seconds: float) -> None:
        self.tick(seconds)

    @invariant()
    def all_is_in_step(self) -> None:
        self.world.check()
        for thing in self.world.state.things.values():
            cell = self.world.cells[thing.cell]
            assert (cell.verdict != FOREVER) == thing.condemned
            if thing.pen and self.world.state.sessions[thing.pen].state == "dying":
                assert thing.condemned, "rounds of the dead are not condemned"

    def teardown(self) -> None:
        world = self.world
        world.kill_in = None
        world.finish_builds()
        for number in list(world.state.sessions):
            world.feed(Gone(number))
        for thing in list(world.state.things.values()):
            assert thing.lifetime == "broker", f"{thing.name} outlived everybody"
        world.check()
        assert not world.state.parked


Broker.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBroker = pytest.mark.watchdog(300)(Broker.TestCase)
