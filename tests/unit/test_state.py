"""The broker's decisions, one by one, with a fake clock and no I/O."""

from __future__ import annotations

import pytest

from ipcsync import errors, wire
from ipcsync.ledger import FOREVER
from ipcsync_broker.model import Gone, Quotas, Stop

from .state_world import SPEC, UID, World

EVENT = wire.CreateEvent("e", "cpu")


def two(world: World) -> None:
    assert isinstance(world.hello(b"a", 11), wire.Welcome)
    assert isinstance(world.hello(b"b", 12), wire.Welcome)


@pytest.fixture
def world() -> World:
    made = World()
    two(made)
    return made


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


def channel(world: World) -> wire.ChannelInfo:
    made: wire.ChannelInfo = world.call(b"a", "create_channel", wire.CreateChannel("c", "cpu", SPEC))
    assert isinstance(world.call(b"b", "open_channel", wire.Open("channel", "c")), wire.ChannelInfo)
    return made


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


# -- liveness


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


# -- who may come, and how much


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"protocol_min": 7, "protocol_max": 9}, "protocol_mismatch"),
        ({"layout": 99}, "protocol_mismatch"),
        ({"uid": 0}, "permission_denied"),
        ({"start": 1}, "invalid_argument"),
        ({"pid": 99}, "invalid_argument"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(world: World, changed: dict[str, int], code: str) -> None:
    refused = world.hello(b"c", 13, **changed)
    assert isinstance(refused, wire.Failure)
    assert refused.code == code
    world.check()


def test_somebody_elses_process_is_refused(world: World) -> None:
    world.processes[13] = ("S", 130, 0)
    assert world.hello(b"c", 13).code == "permission_denied"  # type: ignore[union-attr]


def test_a_session_that_reconnects_keeps_its_number_and_block(world: World) -> None:
    again = world.hello(b"a2", 11, session=1)
    assert isinstance(again, wire.Welcome)
    assert (again.session, again.resumed) == (1, True)
    assert world.call(b"a2", "beat", wire.Beat()) == wire.Empty()
    stolen = world.hello(b"c", 13, session=2)
    assert isinstance(stolen, wire.Welcome)
    assert not stolen.resumed
    world.check()


def test_quotas() -> None:
    world = World(Quotas(sessions=2, events=3, session_events=2, session_channels=1, session_nbytes=700))
    two(world)
    assert world.hello(b"c", 13).code == "quota_exceeded"  # type: ignore[union-attr]
    assert isinstance(world.call(b"a", "create_channel", wire.CreateChannel("c", "cpu", SPEC)), wire.ChannelInfo)
    refused = world.call(b"a", "create_channel", wire.CreateChannel("d", "cpu", SPEC))
    assert (refused.code, refused.fields) == ("quota_exceeded", {"resource": "channels", "limit": 1})
    world.call(b"a", "create_event", EVENT)
    assert world.call(b"a", "create_event", wire.CreateEvent("f", "cpu")).fields["limit"] == 2
    big = wire.CreateChannel("g", "cpu", wire.ChannelSpec(fields=SPEC.fields, stride=4096, depth=2))
    assert world.call(b"b", "create_channel", big).fields == {"resource": "bytes", "limit": 700}
    world.call(b"b", "create_event", wire.CreateEvent("h", "cpu"))
    assert world.call(b"b", "create_event", wire.CreateEvent("i", "cpu")).fields["limit"] == 3
    world.call(b"a", "bye", wire.Bye())
    assert isinstance(world.call(b"b", "create_event", wire.CreateEvent("i", "cpu")), wire.EventInfo)
    world.check()


def test_a_field_outside_the_buffer_is_refused(world: World) -> None:
    spec = wire.ChannelSpec(fields=(wire.FieldSpec("array", (4,), "float64", offset=240),), stride=256, depth=2)
    assert world.call(b"a", "create_channel", wire.CreateChannel("c", "cpu", spec)).code == "invalid_argument"
    world.check()


def test_snapshots_come_in_pages_and_in_order() -> None:
    world = World(Quotas(sessions=2, events=2000))
    two(world)
    names = sorted(f"e{i}" for i in range(1200))
    for name in names:
        world.call(b"a", "create_event", wire.CreateEvent(name, "cpu"))
    seen: list[str] = []
    after, more = "", True
    while more:
        page = world.call(b"b", "snapshot", wire.Snapshot(after))
        seen += [body["name"] for body in page.created]
        assert page.seq == world.state.seq
        after, more = seen[-1], page.more
    assert seen == names


def test_requests_that_do_not_fit_are_answered_and_counted(world: World) -> None:
    world.send(b"a", "nonsense", wire.Empty())
    assert world.answer(b"a", "beat").code == "bad_message"
    world.send(b"a", "create_event", wire.Unlink("e"))
    assert world.answer(b"a", "beat").code == "bad_message"
    world.send(b"a", "beat", wire.Beat(), v=9)
    assert world.answer(b"a", "beat").code == "protocol_mismatch"
    world.send(b"x", "beat", wire.Beat())
    assert world.answer(b"x", "beat").code == "invalid_state"
    assert world.state.counts["bad_messages"] == 2


def test_a_lingering_broker_leaves_with_its_last_session() -> None:
    world = World(linger=5.0)
    world.tick(4.0)
    two(world)
    world.tick(10.0)
    assert not world.left
    world.call(b"a", "bye", wire.Bye())
    world.kill(2)
    world.tick()
    assert world.left


def test_stopping_tells_everybody(world: World) -> None:
    world.send(b"b", "open_event", wire.Open("event", "e"))
    world.feed(Stop())
    assert world.answer(b"b", "open_event").code == "broker_unavailable"
    assert world.announced[-1].kind == "stopping"
    assert world.left


def test_announcements_are_numbered_without_a_gap(world: World) -> None:
    world.call(b"a", "create_event", EVENT)
    world.tick(3.0)
    world.kill(1)
    assert [a.seq for a in world.announced] == list(range(1, world.state.seq + 1))
    assert sum(a.kind == "tick" for a in world.announced) == 3


# -- a broker that was killed and restarted


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
