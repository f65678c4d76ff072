"""A session and its broker: meeting, losing and finding each other, and parting."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, errors, wire
from ipcsync import runtime as module
from ipcsync.ledger import Cell, Ledger

from ..harness import Broker, Child, Gate, Peer, wait_until

Spawn = Callable[..., Child]


def collect(raised: list[BaseException], call: Callable[[], object]) -> threading.Thread:
    """Runs `call` in a thread and keeps what it raises."""

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# -- meeting


def test_no_broker_is_said_with_what_to_do(runtime: Path) -> None:
    with pytest.raises(errors.BrokerUnavailable, match="ipcsync broker") as caught:
        ipcsync.connect(timeout=0.05)
    assert str(runtime) in str(caught.value)
    with pytest.raises(errors.BrokerUnavailable):
        ipcsync.connect(runtime / "nowhere", timeout=0.05)


def test_a_broker_that_comes_late_is_met(runtime: Path) -> None:
    met: list[Session] = []
    waiting = threading.Thread(target=lambda: met.append(ipcsync.connect(timeout=30.0)))
    waiting.start()
    broker = Broker(runtime)
    waiting.join(30)
    met[0].close()
    assert broker.stop() == 0


def test_versions_that_share_no_protocol_are_both_named(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_MIN", 41)
    monkeypatch.setattr(wire, "PROTOCOL_MAX", 42)
    with pytest.raises(errors.ProtocolMismatch) as caught:
        ipcsync.connect()
    assert "42" in str(caught.value)
    assert "1" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"namespace": "a b"}, {"name": "x" * 65}, {"name": ""}, {"streams": "jax"}],
)
def test_arguments_are_checked_before_anything_is_done(runtime: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        ipcsync.connect(**options)


@pytest.mark.leaves("broker.log")
def test_a_broker_that_a_session_started_leaves_with_the_last(runtime: Path) -> None:
    first = ipcsync.connect(start_broker=True)
    pid = runtime_pid(runtime)
    second = ipcsync.connect(start_broker=True)
    first.close()
    second.create_event("e", device="cpu").record()
    assert runtime_pid(runtime) == pid
    second.close()
    wait_until(lambda: runtime_pid(runtime) is None, "the broker's end")


@pytest.mark.leaves("broker.log")
def test_a_broker_that_is_about_to_leave_is_followed_by_another(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, look = [4711], module.broker_pid  # it left between our look and our hello
    monkeypatch.setattr("ipcsync.runtime.broker_pid", lambda where: seen.pop() if seen else look(where))
    with ipcsync.connect(start_broker=True, timeout=30.0) as session:
        assert session.create_event("e", device="cpu").record() == 1
    wait_until(lambda: look(runtime) is None, "the broker's end")


def runtime_pid(directory: Path) -> int | None:
    return module.broker_pid(directory)


def test_a_request_that_no_message_holds_is_refused_here(session: Session) -> None:
    fields = {f"field-{i}": ipcsync.Field((1,), "uint8") for i in range(20_000)}
    with pytest.raises(errors.InvalidArgument):
        session.create_array("large", fields, device="cpu")
    assert session.create_event("e", device="cpu").record() == 1


# -- a gap between two brokers


def test_attached_work_goes_on_without_a_broker_and_calls_end_at_their_deadline(runtime: Path) -> None:
    broker = Broker(runtime)
    with ipcsync.connect() as session:
        event, other = session.create_event("e", device="cpu"), session.create_event("other", device="cpu")
        assert event.record() == 1
        broker.kill()
        assert event.record() == 2
        event.synchronize(round=2)
        with pytest.raises(errors.BrokerUnavailable):
            session.create_event("late", device="cpu", timeout=0.1)
        with pytest.raises(errors.BrokerUnavailable):
            other.record(timeout=0.1)  # a first record needs the pen
        broker.start()
        assert session.create_event("late", device="cpu").record() == 1
        assert other.record() == 1
        assert event.record() == 3
    assert broker.stop() == 0


def test_a_call_under_way_is_answered_by_the_next_broker(runtime: Path) -> None:
    broker = Broker(runtime)
    with ipcsync.connect() as session, ipcsync.connect() as other:
        found: list[Any] = []
        opening = threading.Thread(target=lambda: found.append(session.open_event("late", timeout=60.0)))
        opening.start()
        wait_until(lambda: session.link._calls and not session.link._outbox, "the request's way to the broker")
        broker.kill()
        broker.start()
        other.create_event("late", device="cpu", timeout=60.0).record()
        opening.join(60)
        found[0].synchronize(round=1)
    assert broker.stop() == 0


def test_work_that_failed_in_the_gap_is_condemned_by_the_next_broker(runtime: Path) -> None:
    broker = Broker(runtime)
    with ipcsync.connect() as session:
        event, stream = session.create_event("e", device="cpu"), ipcsync.Stream("cpu")
        event.record(stream)
        event.synchronize(round=1)
        broker.kill()
        stream.enqueue(lambda: 1 / 0)
        event.record(stream)
        broker.start()
        with pytest.raises(errors.PeerFailed):
            event.synchronize(round=2)
    assert broker.stop() == 0


def test_a_broker_that_knows_nothing_ends_the_session(runtime: Path) -> None:
    broker = Broker(runtime)
    session = ipcsync.connect()
    event = session.create_event("e", device="cpu")
    event.record()
    raised: list[BaseException] = []
    waiting = collect(raised, lambda: event.synchronize(round=2, timeout=None))
    broker.kill()
    for name in ("journal", "ledger"):
        (runtime / name).unlink()
    broker.start()
    waiting.join(30)
    assert [type(error) for error in raised] == [errors.ResourceLost]
    for call in (event.record, event.query, lambda: session.open_event("e")):
        with pytest.raises(errors.ResourceLost):
            call()
    session.close()
    with ipcsync.connect() as again:
        assert again.create_event("e", device="cpu").record() == 1
    assert broker.stop() == 0


# -- deaths that no broker sees


def record_and_stay(peer: Peer) -> None:
    with ipcsync.connect(name="victim") as session:
        event, stream = session.open_event("e"), ipcsync.Stream("cpu")
        gate = Gate()
        event.record()
        stream.enqueue(gate.hold)
        event.record(stream)
        peer.send("recorded")
        peer.recv()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_waiter_needs_no_broker_to_learn_of_a_death(runtime: Path, spawn: Spawn, how: signal.Signals) -> None:
    broker = Broker(runtime)
    with ipcsync.connect() as session:
        event = session.create_event("e", device="cpu")
        victim = spawn(record_and_stay)
        assert victim.recv() == "recorded"
        raised: list[BaseException] = []
        threads = [
            collect(raised, lambda n=n: event.synchronize(round=n, timeout=None))  # type: ignore[misc]
            for n in (2, 3)
        ]
        os.kill(broker.pid, how)
        if how == signal.SIGKILL:
            broker.process.wait(30)
        victim.kill()
        for thread in threads:
            thread.join(30)
        assert [type(error) for error in raised] == [errors.PeerDied] * 2
        assert {(error.session, error.pid) for error in raised} == {("victim", victim.pid)}  # type: ignore[attr-defined]
        event.synchronize(round=1)
        if how == signal.SIGKILL:
            broker.start()
        else:
            os.kill(broker.pid, signal.SIGCONT)
        wait_until(lambda: event._timeline.verdict == 2, "the verdict")
        event.close()
        again = session.create_event("e", device="cpu")
        assert again.record() == 1
    assert broker.stop() == 0


# -- parting


def test_close_wakes_calls_to_the_broker_too(broker: Broker) -> None:
    session = ipcsync.connect()
    raised: list[BaseException] = []
    opening = collect(raised, lambda: session.open_event("never", timeout=None))
    wait_until(lambda: session.link._calls, "the call")
    session.close()
    opening.join(30)
    assert [type(error) for error in raised] == [errors.SessionClosed]
    with pytest.raises(errors.SessionClosed):
        session.create_event("e", device="cpu")


def test_close_does_not_wait_for_a_broker_that_is_not_there(runtime: Path) -> None:
    broker = Broker(runtime)
    session = ipcsync.connect()
    events = [session.create_event(f"e-{i}", device="cpu") for i in range(5)]
    for event in events:
        event.record()
    broker.kill()
    session.close(timeout=1000.0)
    broker.start()
    assert broker.stop() == 0


def test_an_event_opened_twice_is_one(session: Session) -> None:
    first = session.create_event("e", device="cpu")
    second = session.open_event("e")
    assert [first.record(), second.record(), first.record()] == [1, 2, 3]
    first.close()
    assert second.record() == 4
    second.close()
    assert session.open_event("e").issued == 4


def test_a_cell_is_not_given_away_while_a_stream_has_yet_to_pass_a_wait(session: Session, runtime: Path) -> None:
    """The wait was satisfied long ago, but the stream will look at the word only when it gets there."""
    stream, gate = ipcsync.Stream("cpu"), Gate()
    event = session.create_event("e", device="cpu")
    producer = ipcsync.Stream("cpu")
    producer_gate = Gate()
    producer.enqueue(producer_gate.hold)
    event.record(producer)
    stream.enqueue(gate.hold)
    event.wait(stream, round=1)
    producer_gate.open()
    event.synchronize(round=1)
    cell = event.info.cell
    event.close()
    session.unlink("e")
    later = [session.create_event(f"later-{i}", device="cpu") for i in range(8)]
    assert cell not in [other.info.cell for other in later]
    gate.open()
    stream.synchronize()
    page = Ledger.open(runtime / "ledger")
    wait_until(lambda: page.words[page.cell(cell) + Cell.STATE] == Cell.FREE, "the cell's return")
    page.region.close()


def test_rounds_are_checked(session: Session) -> None:
    event = session.create_event("e", device="cpu")
    for call in (event.wait, event.synchronize, event.query):
        for bad in (0, -1, 1 << 60, 1.5, "1"):
            with pytest.raises(errors.InvalidArgument, match="count from 1"):
                call(round=bad)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument):
        event.ref(0)


def test_what_belongs_to_a_process_is_not_passed_to_another(session: Session) -> None:
    """A beginner's first try: Process(target=work, args=(session,))."""
    event = session.create_event("e", device="cpu")
    channel = session.create_channel("c", shape=(4,), device="cpu")
    array = session.create_array("a", shape=(4,), device="cpu")
    with channel.reader() as reader, channel.writer() as writer:
        for thing in (session, event, channel, reader, writer, array):
            with pytest.raises(errors.InvalidState, match="pass names"):
                pickle.dumps(thing)


def test_a_writer_that_gave_up_says_which_reader_holds_the_buffers(session: Session) -> None:
    channel = session.create_channel("frames", shape=(4,), depth=2, device="cpu")
    with ipcsync.connect(name="slow") as other, other.open_channel("frames").reader(), channel.writer() as writer:
        for _ in range(2):
            with writer.slot():
                pass
        with pytest.raises(errors.WaitTimeout) as found, writer.slot(timeout=0.05):
            pass
    assert "waits for a free buffer of channel 'frames'" in found.value.why
    assert "held up by: 'slow'" in found.value.why
