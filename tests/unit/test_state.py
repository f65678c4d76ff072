"""The broker's decisions on names, pens and channels, one by one, with a fake clock and no I/O."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import pytest

from ipcsync import errors, wire
from ipcsync.ledger import FOREVER
from ipcsync_broker.model import Gone

from .state_world import EVENT, SPEC, World, channel, world  # noqa: F401


@pytest.mark.parametrize(("via", "recorded"), [("cuda-event", True), ("auto", False)])
def test_a_cuda_event_that_streams_wait_on_is_recorded_from_the_first_round_on(
    world: World, via: wire.Via, recorded: bool
) -> None:
    made = world.call(b"a", "create_event", wire.CreateEvent("on-gpu", "GPU-0", via))
    assert made is not None
    assert made.via == via
    assert world.cells[made.cell].mirror == recorded


def test_an_open_waits_until_the_name_appears(world: World) -> None:
    assert world.call(b"b", "open_event", wire.Open("event", "e")) is None
    made = world.call(b"a", "create_event", EVENT)
    assert world.answer(b"b", "open_event") == made
    assert world.announced[-1].kind == "created"
    world.check()


def test_an_open_ends_at_its_deadline_with_not_found(world: World) -> None:
    world.send(b"b", "open_event", wire.Open("event", "e"), left=1.0)
    world.tick(0.9)
    assert world.answer(b"b", "open_event") is None
    world.tick(0.2)
    assert world.answer(b"b", "open_event").code == "not_found"


def test_a_name_that_is_not_there_brings_the_nearest(world: World) -> None:
    world.call(b"a", "create_event", EVENT)
    world.call(b"a", "create_event", wire.CreateEvent("camera.left", "cpu"))
    world.hello(b"c", 13, namespace="other")
    for who, name, said in (
        (b"b", "camera.lef", "did you mean 'camera.left'?"),
        (b"c", "e", "did you mean 'e in namespace default'?"),
        (b"b", "zzz", "is the process that creates it running"),
    ):
        answer = world.call(who, "open_event", wire.Open("event", name), left=0.0)
        assert answer.code == "not_found"
        assert said in answer.message


def test_names_live_in_their_namespace(world: World) -> None:
    world.call(b"a", "create_event", EVENT)
    world.hello(b"c", 13, namespace="other")
    assert world.call(b"c", "open_event", wire.Open("event", "e"), left=0.0).code == "not_found"
    assert world.call(b"c", "create_event", EVENT).incarnation == 2


def test_a_name_in_use_is_refused_unless_equal_and_allowed(world: World) -> None:
    made = world.call(b"a", "create_event", EVENT)
    assert world.call(b"b", "create_event", EVENT).code == "name_in_use"
    assert world.call(b"b", "create_event", wire.CreateEvent("e", "cpu", exist_ok=True)) == made
    other = wire.CreateEvent("e", "cpu", exist_ok=True, lifetime="broker")
    assert "lifetime" in world.call(b"b", "create_event", other).message
    channel = wire.CreateChannel("e", "cpu", SPEC, exist_ok=True)
    assert "kind" in world.call(b"b", "create_channel", channel).message


def test_opening_with_the_wrong_call_says_which_is_right(world: World) -> None:
    world.call(b"a", "create_event", EVENT)
    assert "open_event" in world.call(b"b", "open_channel", wire.Open("channel", "e")).message


def test_one_recorder_at_a_time(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    assert world.call(b"a", "pen", wire.Pen(event.incarnation)) == wire.PenReply(0)
    refused = world.call(b"b", "pen", wire.Pen(event.incarnation))
    assert (refused.code, refused.fields["session"], refused.fields["pid"]) == ("recorder_busy", "a", 11)
    world.cells[event.cell].issued = 3
    assert world.call(b"a", "pen_back", wire.PenBack(event.incarnation)).code == "invalid_state"
    world.cells[event.cell].completed = 3
    assert world.call(b"a", "pen_back", wire.PenBack(event.incarnation)) == wire.Empty()
    assert world.call(b"b", "pen", wire.Pen(event.incarnation)) == wire.PenReply(3)
    world.check()


def test_a_recorders_death_condemns_and_frees_the_name(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    world.cells[event.cell].issued, world.cells[event.cell].completed = 5, 3
    world.kill(1, gone=False)
    assert world.cells[event.cell].verdict == 4
    condemned = next(a for a in world.announced if a.kind == "condemned")
    assert condemned.body["round"] == 4
    assert condemned.body["pid"] == 11
    world.check()
    again = world.call(b"b", "create_event", EVENT)
    assert again.cell != event.cell, "the old cell is b's until b lets go"
    world.check()
    world.processes.pop(11)
    world.feed(Gone(1))
    assert event.cell in world.cells
    assert world.call(b"b", "detach", wire.Detach(event.incarnation)) == wire.Empty()
    assert event.cell not in world.cells
    world.check()


def test_an_event_whose_creator_dies_before_anyone_recorded_it_ends(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    world.kill(1)
    assert world.cells[event.cell].verdict == 1


def test_an_event_of_a_dead_creator_lives_while_another_records_it(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    world.call(b"b", "pen", wire.Pen(event.incarnation))
    world.kill(1)
    assert world.cells[event.cell].verdict == FOREVER
    assert ("default", "e") in world.state.names
    world.call(b"b", "bye", wire.Bye())
    world.check()
    assert not world.cells


def test_bye_frees_everything(world: World) -> None:
    world.call(b"a", "create_event", EVENT)
    world.call(b"a", "create_channel", wire.CreateChannel("c", "cpu", SPEC))
    world.call(b"a", "bye", wire.Bye())
    world.check()
    assert not world.cells
    assert not world.built
    assert world.call(b"a", "beat", wire.Beat()).code == "invalid_state"


def test_lifetime_broker_outlives_its_creator_until_unlinked(world: World) -> None:
    world.call(b"a", "create_event", wire.CreateEvent("e", "cpu", lifetime="broker"))
    world.call(b"a", "bye", wire.Bye())
    assert isinstance(world.call(b"b", "open_event", wire.Open("event", "e")), wire.EventInfo)
    world.call(b"b", "unlink", wire.Unlink("e"))
    assert world.cells, "b still has it open"
    world.call(b"b", "detach", wire.Detach(1))
    assert not world.cells
    world.check()


def test_a_goodbye_with_rounds_undone_is_a_death(world: World) -> None:
    event = world.call(b"a", "create_event", EVENT)
    world.call(b"b", "open_event", wire.Open("event", "e"))
    world.call(b"a", "pen", wire.Pen(event.incarnation))
    world.cells[event.cell].issued = 1
    world.call(b"a", "bye", wire.Bye())
    assert world.cells[event.cell].verdict == 1
    assert 1 in world.state.sessions, "its process lives and its work may still land"
    world.feed(Gone(1))
    assert 1 not in world.state.sessions
    world.check()


def test_a_goodbye_with_waits_outstanding_keeps_the_block_until_they_are_over(world: World) -> None:
    world.waits.add(world.state.sessions[1].block)
    world.call(b"a", "bye", wire.Bye())
    world.tick()
    assert 1 in world.state.sessions
    world.waits.clear()
    world.tick()
    assert 1 not in world.state.sessions
    world.check()


# -- channels


def test_a_new_writer_waits_until_the_dead_one_is_gone_and_begins_an_epoch(world: World) -> None:
    info = channel(world)
    inc = info.event.incarnation
    assert world.call(b"a", "join_writer", wire.JoinWriter(inc)) == wire.WriterReply(info.event, 1, 0)
    assert world.call(b"b", "join_writer", wire.JoinWriter(inc)).code == "recorder_busy"
    world.cells[info.event.cell].issued, world.cells[info.event.cell].completed = 7, 5
    world.kill(1, gone=False)
    assert world.call(b"b", "join_writer", wire.JoinWriter(inc)) is None
    world.processes.pop(11)
    world.feed(Gone(1))
    reply = world.answer(b"b", "join_writer")
    assert (reply.epoch, reply.base) == (2, 7)
    assert reply.event.cell != info.event.cell
    assert world.cells[reply.event.cell].issued == 7
    world.check()


def test_a_writer_that_leaves_keeps_the_pen_until_its_items_are_complete(world: World) -> None:
    info = channel(world)
    inc, cell = info.event.incarnation, world.cells[info.event.cell]
    world.call(b"a", "join_writer", wire.JoinWriter(inc))
    cell.issued = 2
    assert world.call(b"a", "leave_writer", wire.LeaveWriter(inc)) == wire.Empty()
    assert world.call(b"b", "join_writer", wire.JoinWriter(inc)) is None
    cell.completed = 2
    world.tick()
    assert world.answer(b"b", "join_writer").base == 2
    assert cell.pen == world.state.sessions[2].block
    world.check()


def test_a_writer_that_dies_after_leaving_still_condemns_what_is_not_complete(world: World) -> None:
    info = channel(world)
    world.call(b"a", "join_writer", wire.JoinWriter(info.event.incarnation))
    world.cells[info.event.cell].issued = 2
    world.call(b"a", "leave_writer", wire.LeaveWriter(info.event.incarnation, "closed"))
    world.kill(1)
    assert world.cells[info.event.cell].verdict == 1
    world.check()


def test_an_ended_stream_takes_no_writer(world: World) -> None:
    inc = channel(world).event.incarnation
    world.call(b"a", "join_writer", wire.JoinWriter(inc))
    world.call(b"a", "leave_writer", wire.LeaveWriter(inc, "closed"))
    assert world.call(b"b", "join_writer", wire.JoinWriter(inc)).code == "invalid_state"


def test_reader_cells_come_back_when_the_reader_left_or_is_gone(world: World) -> None:
    inc = channel(world).event.incarnation
    assert world.call(b"a", "join_reader", wire.JoinReader(inc)) == wire.ReaderReply(0, 1)
    assert world.call(b"b", "join_reader", wire.JoinReader(inc)) == wire.ReaderReply(1, 1)
    assert world.call(b"b", "join_reader", wire.JoinReader(inc)).code == "quota_exceeded"
    world.call(b"a", "leave_reader", wire.LeaveReader(inc, 0))
    world.call(b"a", "leave_reader", wire.LeaveReader(inc, 1))  # not its own: nothing happens
    world.check()
    world.kill(2, gone=False)
    assert (inc, 1) in world.places
    world.feed(Gone(2))
    assert not world.places
    world.check()


def test_a_build_in_progress_holds_the_name_and_a_dead_creator_gets_nothing(world: World) -> None:
    world.held_builds = []
    assert world.call(b"a", "create_channel", wire.CreateChannel("c", "cpu", SPEC)) is None
    assert world.call(b"b", "create_channel", wire.CreateChannel("c", "cpu", SPEC)).code == "name_in_use"
    assert world.call(b"b", "create_channel", wire.CreateChannel("c", "cpu", SPEC, exist_ok=True)) is None
    world.kill(1)
    world.finish_builds()
    assert isinstance(world.answer(b"b", "create_channel"), wire.ChannelInfo), "b's own, once a's was dropped"
    world.check()


def test_a_request_sent_again_while_it_is_being_built_is_answered_when_it_is(world: World) -> None:
    world.held_builds = []
    for _ in range(2):
        world.send(b"a", "create_channel", wire.CreateChannel("c", "cpu", SPEC), id=7)
    assert world.answer(b"a", "create_channel") is None
    world.finish_builds()
    first, again = (world.answer(b"a", "create_channel") for _ in range(2))
    assert first == again
    assert isinstance(first, wire.ChannelInfo)
    world.kill(1)
    assert not world.state.things
    world.check()


def test_a_build_that_fails_leaves_nothing(world: World) -> None:
    world.build_error = errors.OutOfSpace("full", needed=512)
    assert world.call(b"a", "create_channel", wire.CreateChannel("c", "cpu", SPEC)).code == "out_of_space"
    world.check()
    assert not world.state.created_by
