"""The broker's decisions on who lives, who is stopped and who is gone, with a fake clock and no I/O."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

from ipcsync import wire
from ipcsync.ledger import FOREVER
from ipcsync_broker.model import Stop

from .state_world import EVENT, UID, World, world  # noqa: F401


def test_a_stopped_process_loses_its_lease_and_a_busy_one_does_not(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    world.tick(10.0)
    assert world.cells[event.cell].verdict == FOREVER, "a program that holds the GIL is silent too"
    world.processes[11] = ("T", 110, UID)
    world.tick(0.5)
    assert world.cells[event.cell].verdict == 1
    assert world.call(b"a", "beat", wire.Beat()).code == "session_closed"
    assert 1 in world.state.sessions, "nothing of it is freed"
    world.check()


def test_others_are_told_of_a_stop_within_four_seconds_and_not_before_three(world: World) -> None:
    world.tick(1.0)
    world.call(b"a", "beat", wire.Beat())
    world.processes[11] = ("T", 110, UID)
    world.tick(3.0)
    assert not world.state.sessions[1].leased_out
    world.tick(1.0)
    assert world.state.sessions[1].leased_out


LOCK = "life-" + "0" * 32


def test_in_another_pid_namespace_a_free_lock_is_the_end(world: World) -> None:
    world.holders[LOCK] = 0
    world.hello(b"c", 13, pid_namespace=1, lock=LOCK)
    made = world.call(b"c", "create_event", wire.CreateEvent("e", "cpu"))
    world.processes.clear()  # its pid means nothing here, nor does its silence
    world.start(11)
    world.start(12)
    world.tick(20.0)
    assert 3 in world.state.sessions
    world.call(b"a", "open_event", wire.Open("event", "e"))
    world.holders[LOCK] = None
    world.tick(0.5)
    assert 3 not in world.state.sessions
    assert world.cells[made.cell].verdict == 1
    world.call(b"a", "detach", wire.Detach(made.incarnation))
    assert not world.state.things, "nothing of the dead is kept"
    world.check()


def test_a_process_of_a_namespace_below_ours_is_seen_stopped(world: World) -> None:
    world.holders[LOCK] = 77
    world.processes[77] = ("S", 130, UID)
    world.hello(b"c", 1, pid_namespace=1, lock=LOCK)
    world.call(b"c", "create_event", wire.CreateEvent("e", "cpu"))
    world.tick(10.0)
    assert not world.state.sessions[3].leased_out, "silent, and not stopped"
    world.processes[77] = ("T", 130, UID)
    world.tick(0.5)
    assert world.state.sessions[3].leased_out


def test_in_a_namespace_that_is_not_seen_heartbeats_say_who_is_stopped(world: World) -> None:
    world.holders[LOCK] = 0
    world.hello(b"c", 1, pid_namespace=1, lock=LOCK)
    world.call(b"c", "create_event", wire.CreateEvent("e", "cpu"))
    world.tick(10.0)
    assert not world.state.sessions[3].leased_out, "silent, and it answers heartbeats: it holds the GIL"
    world.call(b"c", "beat", wire.Beat())
    world.stopped.add(LOCK)
    world.tick(3.0)
    assert not world.state.sessions[3].leased_out, "not so soon"
    world.tick(1.0)
    assert world.state.sessions[3].leased_out


def test_a_stopping_broker_frees_what_only_the_dead_hold(world: World) -> None:
    world.holders[LOCK] = 0
    world.hello(b"c", 13, pid_namespace=1, lock=LOCK)
    world.holders[LOCK] = None
    world.feed(Stop())
    assert 3 not in world.state.sessions


def test_a_beat_in_the_ledger_is_as_good_as_a_message(world: World) -> None:
    world.processes[11] = ("T", 110, UID)  # stopped and continued, seen only while stopped
    for n in range(10):
        world.beats[world.state.sessions[1].block] = n + 1
        world.tick(1.0)
    assert not world.state.sessions[1].leased_out
    world.tick(4.0)
    assert world.state.sessions[1].leased_out


def test_the_brokers_own_stall_is_nobodys_silence(world: World) -> None:
    world.processes[11] = ("T", 110, UID)
    world.now += 60.0
    world.tick(1.0)
    assert not world.state.sessions[1].leased_out


def test_suspicion_is_checked(world: World) -> None:
    block = world.state.sessions[1].block
    world.call(b"b", "suspect", wire.Suspect(block))
    assert world.state.sessions[1].state == "live"
    world.dead_blocks.add(block)
    world.call(b"b", "suspect", wire.Suspect(block))
    assert world.state.sessions[1].state == "dying"
