"""Layer 1 within a process: every sentence that torch documents of Event and Stream, and what ipcsync adds to it."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import gc
import threading
import time

import pytest

import ipcsync
from ipcsync import Event, Stream, errors
from ipcsync.backends import select

from .cases import Case, case  # noqa: F401


def test_without_a_device_it_is_the_accelerators_if_there_is_one(case: Case) -> None:
    there = "cuda" if select.has_cuda() else "cpu"
    assert Event().device.type == Stream().device.type == ipcsync.current_stream().device.type == there
    assert Event(case.device).device.type == Stream(case.device).device.type == case.device
    assert Event(device=Stream(case.device).device).device.type == case.device


def test_an_event_never_recorded_is_complete_and_no_wait(case: Case) -> None:
    event, stream = Event(case.device), case.stream()
    assert event.query() is True
    event.synchronize()
    event.wait(stream)
    stream.synchronize()
    exported = Event(case.device, interprocess=True)
    exported.ipc_handle()
    assert exported.query()
    exported.synchronize()


def test_query_and_synchronize_tell_when_the_work_before_it_is_done(case: Case) -> None:
    event, stream = Event(case.device), case.stream()
    gate = case.hold(stream)
    assert event.record(stream) is None  # type: ignore[func-returns-value]
    assert not event.query()
    assert not stream.query()
    gate.open()
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()


def test_an_event_says_nothing_of_work_behind_it(case: Case) -> None:
    event, stream = Event(case.device), case.stream()
    event.record(stream)
    gate = case.hold(stream)
    event.synchronize()
    assert event.query()
    assert not stream.query()
    gate.open()


def test_record_event_is_record(case: Case) -> None:
    stream = case.stream()
    gate = case.hold(stream)
    event = Event(case.device)
    assert stream.record_event(event) is event
    made = stream.record_event()
    assert isinstance(made, Event)
    assert not event.query()
    assert not made.query()
    gate.open()
    made.synchronize()
    assert event.query()


def test_a_stream_that_waits_goes_on_only_behind_the_event(case: Case) -> None:
    slow, fast = case.stream(), case.stream()
    values = case.array([0], "int64")
    fast.synchronize()
    gate = case.hold(slow)
    case.fill(slow, values, 7)
    event = slow.record_event()
    fast.wait_event(event)
    copy = case.copy_later(fast, values)
    done = fast.record_event()
    assert not done.query()
    assert not fast.query()
    gate.open()
    done.synchronize()
    assert copy.tolist() == [7]


def test_event_wait_is_wait_event_and_takes_the_current_stream(case: Case) -> None:
    slow, given, current = case.stream(), case.stream(), case.stream()
    gate = case.hold(slow)
    event = Event(case.device)
    with slow:
        event.record()
    event.wait(given)
    with current:
        event.wait()
    assert not given.query()
    assert not current.query()
    gate.open()
    given.synchronize()
    current.synchronize()


def test_a_wait_is_for_the_latest_record_when_it_was_called(case: Case) -> None:
    held, free, waiter, later = (case.stream() for _ in range(4))
    event = Event(case.device)
    gate = case.hold(held)
    event.record(held)
    waiter.wait_event(event)
    event.record(free)
    later.wait_event(event)
    later.synchronize()
    event.synchronize()
    assert event.query(), "the event stands for its latest record, on the stream that is free"
    assert not waiter.query(), "this wait was for the record before"
    gate.open()
    waiter.synchronize()


def test_a_wait_does_not_see_later_records(case: Case) -> None:
    held, free, waiter = (case.stream() for _ in range(3))
    event = Event(case.device)
    event.record(free)
    free.synchronize()
    waiter.wait_event(event)
    gate = case.hold(held)
    event.record(held)
    waiter.synchronize()
    assert not event.query()
    gate.open()
    event.synchronize()


def test_an_event_is_recorded_again_and_again_without_waiting_for_it(case: Case) -> None:
    stream = case.stream()
    event = Event(case.device)
    gate = case.hold(stream)
    for _ in range(300):
        event.record(stream)
    assert not event.query()
    gate.open()
    event.synchronize()


def test_several_events_are_waited_for(case: Case) -> None:
    streams = [case.stream() for _ in range(3)]
    gates = [case.hold(stream) for stream in streams]
    events = [stream.record_event() for stream in streams]
    main = case.stream()
    for event in events:
        main.wait_event(event)
    for gate in gates:
        assert not main.query()
        gate.open()
    main.synchronize()
    assert all(event.query() for event in events)


def test_wait_stream_waits_for_all_that_was_given_so_far(case: Case) -> None:
    ahead, behind = case.stream(), case.stream()
    gate = case.hold(ahead)
    behind.wait_stream(ahead)
    assert not behind.query()
    gate.open()
    behind.synchronize()
    again = case.hold(ahead)
    assert behind.query(), "what the other stream is given later is not waited for"
    again.open()


def test_elapsed_time_is_in_milliseconds(case: Case) -> None:
    stream = case.stream()
    gate = case.hold(stream)
    begin = stream.record_event()
    other = case.stream()
    later = case.hold(other)
    stream.wait_event(other.record_event())
    end = stream.record_event()
    with pytest.raises(errors.InvalidState, match="complete"):
        begin.elapsed_time(end)
    gate.open()
    begin.synchronize()
    time.sleep(0.02)  # what is measured
    later.open()
    end.synchronize()
    assert 19.0 < begin.elapsed_time(end) < 30_000
    assert begin.elapsed_time(begin) == 0.0


def test_what_elapsed_time_refuses(case: Case) -> None:
    timed, untimed, never = Event(case.device, enable_timing=True), Event(case.device), Event(case.device)
    for event in (timed, untimed):
        event.record()
        event.synchronize()
    for pair in ((timed, untimed), (untimed, timed)):
        with pytest.raises(errors.InvalidState, match="enable_timing=True"):
            pair[0].elapsed_time(pair[1])
    never = Event(case.device, enable_timing=True)
    with pytest.raises(errors.InvalidState, match="recorded"):
        timed.elapsed_time(never)
    with pytest.raises(errors.InvalidArgument):
        timed.elapsed_time("end")  # type: ignore[arg-type]


def test_blocking_events_do_the_same(case: Case) -> None:
    event, stream = Event(case.device, blocking=True), case.stream()
    gate = case.hold(stream)
    event.record(stream)
    assert not event.query()
    gate.open()
    event.synchronize()
    assert event.query()


# -- handles, in the process that made them


def test_timing_and_interprocess_exclude_each_other(case: Case) -> None:
    with pytest.raises(errors.InvalidArgument, match="time"):
        Event(case.device, enable_timing=True, interprocess=True)


def test_a_handle_is_64_bytes_and_always_the_same(case: Case) -> None:
    event = Event(case.device, interprocess=True)
    handle = event.ipc_handle()
    assert isinstance(handle, bytes)
    assert len(handle) == 64
    event.record()
    assert event.ipc_handle() == handle
    assert Event(case.device, interprocess=True).ipc_handle() != handle


def test_only_interprocess_events_have_handles(case: Case) -> None:
    with pytest.raises(errors.InvalidState, match="interprocess=True"):
        Event(case.device).ipc_handle()


def test_opened_where_it_was_exported_it_is_the_event_itself(case: Case) -> None:
    event = Event(case.device, interprocess=True)
    assert Event.from_ipc_handle(case.device, event.ipc_handle()) is event
    assert Event.from_ipc_handle(event.device, event.ipc_handle()) is event


@pytest.mark.parametrize(
    "handle", [b"", b"short", b"\0" * 64, b"\1" * 64, b"\1" * 65, bytes(range(64)), None, "x" * 64]
)
def test_what_is_no_handle_is_refused(case: Case, handle: object) -> None:
    with pytest.raises(errors.HandleInvalid):
        Event.from_ipc_handle(case.device, handle)  # type: ignore[arg-type]


def test_the_handle_of_an_event_that_was_let_go_opens_nothing(case: Case) -> None:
    event = Event(case.device, interprocess=True)
    handle = event.ipc_handle()
    del event
    gc.collect()
    with pytest.raises(errors.HandleInvalid):
        Event.from_ipc_handle(case.device, handle)


# -- lifetimes


def test_a_pending_wait_keeps_what_it_needs(case: Case) -> None:
    slow, fast = case.stream(), case.stream()
    gate = case.hold(slow)
    fast.wait_event(slow.record_event())
    gc.collect()
    assert not fast.query()
    gate.open()
    fast.synchronize()


def test_a_stream_that_was_let_go_does_its_work(case: Case) -> None:
    stream = case.stream()
    values = case.array([0], "int64")
    gate = case.hold(stream)
    case.fill(stream, values, 5)
    event = stream.record_event()
    del stream
    gc.collect()
    assert not event.query()
    gate.open()
    event.synchronize()
    assert values.tolist() == [5]


def test_thousands_of_events(case: Case) -> None:
    stream = case.stream()
    gate = case.hold(stream)
    # A CUDA stream that is held takes a thousand commands or so; after that it keeps its caller.
    events = [stream.record_event() for _ in range(5000 if case.device == "cpu" else 500)]
    assert not any(event.query() for event in events)
    gate.open()
    events[-1].synchronize()
    assert all(event.query() for event in events)


# -- streams


def test_the_current_stream_is_the_innermost_of_this_thread(case: Case) -> None:
    outer, inner, before = case.stream(), case.stream(), ipcsync.current_stream(case.device)
    seen: list[Stream] = []
    with outer as entered:
        assert entered is outer
        with inner:
            assert ipcsync.current_stream(case.device) is inner
            other = threading.Thread(target=lambda: seen.append(ipcsync.current_stream(case.device)))
            other.start()
            other.join()
        with pytest.raises(KeyError), inner, outer:
            raise KeyError
        assert ipcsync.current_stream(case.device) is outer
    assert ipcsync.current_stream(case.device) == before
    assert seen[0] not in (outer, inner), "another thread has its own"


def test_equal_streams_are_the_same_queue(case: Case) -> None:
    one, two = case.stream(), case.stream()
    assert one == one
    assert one != two
    assert len({one, two, one}) == 2
    assert ipcsync.current_stream(case.device) == ipcsync.current_stream(case.device)
    assert one != "stream"


@pytest.mark.parametrize("wrong", ["stream", 1.5, object(), True])
def test_what_is_no_stream_is_refused(case: Case, wrong: object) -> None:
    event = Event(case.device)
    for call in (event.record, event.wait, case.stream().wait_stream):
        with pytest.raises(errors.InvalidArgument, match="stream"):
            call(wrong)
    assert event.query(), "nothing was recorded"


def test_arguments_that_are_wrong(case: Case) -> None:
    stream = case.stream()
    with pytest.raises(errors.InvalidArgument, match="function"):
        stream.enqueue("work")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="event"):
        stream.wait_event("event")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="priority"):
        Stream(case.device, priority="high")  # type: ignore[arg-type]
    Stream(case.device, priority=-1).synchronize()


def test_work_is_done_in_order_and_with_its_arguments(case: Case) -> None:
    stream = case.stream()
    values = case.array([0] * 64, "int64")
    for i in range(64):
        stream.enqueue(values.__setitem__, i, i)
        stream.enqueue(values.__setitem__, slice(i + 1, None), -1)
    stream.synchronize()
    assert values.tolist() == list(range(64))


def test_any_thread_may_use_them(case: Case) -> None:
    stream, event = case.stream(), Event(case.device)
    raised: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(200):
                event.record(stream)
                event.wait(stream)
                event.query()
                event.synchronize()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert event.query()
