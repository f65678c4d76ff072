"""The broker's decisions on who may come, how much they may have and what all are told, with no I/O."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import pytest

from ipcsync import wire
from ipcsync_broker.model import Quotas, Stop

from .state_world import EVENT, SPEC, World, two, world  # noqa: F401


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
