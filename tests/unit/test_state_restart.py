"""What a broker decides that was started after one was killed, with a fake clock and no I/O."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

from ipcsync import wire
from ipcsync.ledger import FOREVER

from .state_world import EVENT, UID, World, channel, world  # noqa: F401


def test_a_restarted_broker_knows_what_was(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    world.cells[event.cell].issued = 4
    world.restart()
    world.check()
    assert world.cells[event.cell].verdict == FOREVER, "its recorder lives and goes on"
    assert world.call(b"a", "beat", wire.Beat()).code == "invalid_state", "the hello comes first"
    held = [{"kind": "event", "incarnation": event.incarnation, "pen": True}]
    again = world.hello(b"a2", 11, session=1, held=held)
    assert isinstance(again, wire.Welcome)
    assert (again.session, again.resumed) == (1, True)
    assert world.call(b"a2", "pen", wire.Pen(event.incarnation)) == wire.PenReply(4)
    assert world.call(b"a2", "create_event", wire.CreateEvent("new", "cpu")).incarnation == 2
    world.check()


def test_who_died_with_the_broker_is_condemned_by_the_next(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    world.cells[event.cell].issued = 1
    del world.processes[11]
    world.restart()
    assert world.cells[event.cell].verdict == 1
    assert 1 not in world.state.sessions
    world.check()


def test_a_process_with_the_same_pid_is_not_the_same(world: World) -> None:
    world.processes[11] = ("S", 999, UID)
    world.restart()
    assert 1 not in world.state.sessions
    world.check()


def test_what_was_condemned_in_the_gap_is_known(world: World) -> None:
    """A waiter took the lock and condemned the dead while there was no broker."""
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    del world.processes[11]
    world.cells[event.cell].verdict = 1
    world.restart()
    assert ("default", "e") not in world.state.names
    world.check()


def test_what_could_not_be_reopened_is_condemned(world: World) -> None:
    info = channel(world)
    world.restart({info.event.incarnation})
    assert world.cells[info.event.cell].verdict == 1
    assert next(a for a in world.announced if a.kind == "condemned").body["reason"] == "lost"
    world.check()


def test_what_a_returning_session_does_not_name_stays_its_own(world: World) -> None:
    """An answer may be on its way to the thread that asked, when the I/O thread says what the session has."""
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    world.restart()
    world.hello(b"a2", 11, session=1)
    assert world.state.things[event.incarnation].pen == 1
    assert world.call(b"a2", "pen_back", wire.PenBack(event.incarnation)) == wire.Empty()
    world.check()


def test_a_session_that_was_closed_in_the_gap_is_seen_off_after_five_seconds(world: World) -> None:
    world.call(b"a", "create_event", EVENT)
    world.closed_blocks.add(world.state.sessions[1].block)
    world.restart()
    world.tick(4.0)
    assert 1 in world.state.sessions
    world.tick(2.0)
    assert set(world.state.sessions) == {2}
    world.check()


def test_a_session_that_is_slow_to_come_back_keeps_what_it_has(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    world.restart()
    world.tick(60.0)
    assert world.cells[event.cell].verdict == FOREVER
    assert isinstance(world.hello(b"a2", 11, session=1, held=[{"incarnation": 1}]), wire.Welcome)


def test_a_request_sent_again_to_the_next_broker_gets_its_answer(world: World) -> None:
    """The dead one had done it, and did not live to answer."""
    channel(world)
    requests = [
        (b"a", "create_event", EVENT, 71),
        (b"a", "join_writer", wire.JoinWriter(1), 72),
        (b"b", "join_reader", wire.JoinReader(1), 73),
    ]
    first = [world.ask(peer, op, body, id) for peer, op, body, id in requests]
    world.restart()
    held = [{"incarnation": 1}]  # nobody knows of the event yet
    for peer, pid, number in ((b"a", 11, 1), (b"b", 12, 2)):
        world.hello(peer, pid, session=number, held=held)
    assert [world.ask(peer, op, body, id) for peer, op, body, id in requests] == first
    assert 2 in world.state.sessions[1].attached
    assert world.ask(b"a", "create_event", EVENT, 99).code == "name_in_use"
    assert world.ask(b"a", "join_writer", wire.JoinWriter(1), 98).code == "recorder_busy"
    world.check()
