"""Host events against a model of what CUDA's events do, in every order of records, completions, failures and waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipcsync import errors
from ipcsync.backends.host_events import LANES, HostEvent

PENDING, DONE, FAILED = "pending", "done", "failed"
_numbers = itertools.count(1_000_000)  # none that a real stream of this process has


class HandStream:
    """A stream that does its next piece of work when told."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.work: list[tuple[Any, ...]] = []
        self.failed = False

    def put(self, fn: Callable[..., object], args: tuple[Any, ...], failed: Callable[..., object]) -> None:
        self.work.append((fn, args, failed))

    def step(self) -> None:
        fn, args, failed = self.work.pop(0)
        if self.failed:
            failed(RuntimeError("work"))
        else:
            fn(*args)


class Model(RuleBasedStateMachine):
    """`records`: what became of each; an event stands for the last. `waits`: tickets taken, and of which record."""

    @initialize()
    def make(self) -> None:
        self.event = HostEvent.create(interprocess=False)
        self.streams = [HandStream() for _ in range(4)]
        self.pending: dict[int, list[int]] = {s.number: [] for s in self.streams}
        self.records: list[str] = []
        self.waits: list[tuple[Any, int]] = []

    @rule(which=st.integers(0, 3))
    def record(self, which: int) -> None:
        stream = self.streams[which]
        if stream.failed and not stream.work:
            self.streams[which] = stream = HandStream()  # a failed stream takes no more
            self.pending[stream.number] = []
        if not stream.failed:
            self.event.record(stream)  # type: ignore[arg-type]
            self.pending[stream.number].append(len(self.records))
            self.records.append(PENDING)

    @rule()
    def record_on_the_thread(self) -> None:
        self.event.record(None)
        self.records.append(DONE)

    @rule(which=st.integers(0, 3))
    def step(self, which: int) -> None:
        stream = self.streams[which]
        if stream.work:
            stream.step()
            record = self.pending[stream.number].pop(0)
            self.records[record] = FAILED if stream.failed else DONE
            if stream.failed:  # and then it is known of those behind it too
                for record in self.pending[stream.number]:
                    self.records[record] = FAILED

    @rule(which=st.integers(0, 3))
    def fail(self, which: int) -> None:
        self.streams[which].failed = True

    @precondition(lambda self: self.records)
    @rule()
    def wait(self) -> None:
        self.waits.append((self.event.latest, len(self.records) - 1))

    @invariant()
    def each_wait_sees_its_own_record(self) -> None:
        if not hasattr(self, "event"):
            return
        for ticket, record in [*self.waits, *([(self.event.latest, len(self.records) - 1)] if self.records else [])]:
            if self.records[record] == FAILED:
                with pytest.raises(errors.PeerFailed):
                    self.event.done(ticket)
            else:
                assert self.event.done(ticket) is (self.records[record] == DONE)


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase


def test_pending_records_on_too_many_streams_are_refused_and_cost_nothing() -> None:
    event = HostEvent.create(interprocess=False)
    streams = [HandStream() for _ in range(LANES)]
    for stream in streams[:-1]:
        event.record(stream)  # type: ignore[arg-type]
    latest = event.latest
    with pytest.raises(errors.InvalidState, match="pending on 63 streams"):
        event.record(streams[-1])  # type: ignore[arg-type]
    assert event.latest == latest
    streams[0].step()
    event.record(streams[-1])  # type: ignore[arg-type]
    streams[-1].step()
    assert event.done(event.latest)


class Interrupted(HandStream):
    """Ctrl-C comes as the record gives the stream its work: before it is given, or after."""

    when: str | None = None

    def put(self, fn: Callable[..., object], args: tuple[Any, ...], failed: Callable[..., object]) -> None:
        if self.when != "before":
            super().put(fn, args, failed)
        if self.when is not None:
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_record_that_was_interrupted_does_not_complete_the_next_one(when: str) -> None:
    event, stream = HostEvent.create(interprocess=False), Interrupted()
    stream.when = when
    with pytest.raises(KeyboardInterrupt):
        event.record(stream)  # type: ignore[arg-type]
    assert event.done(event.latest), "nothing was recorded"
    while stream.work:
        stream.step()
    stream.when = None
    event.record(stream)  # type: ignore[arg-type]
    assert not event.done(event.latest)
    stream.step()
    assert event.done(event.latest)


def test_a_new_stream_at_the_address_of_an_old_one_is_another() -> None:
    event = HostEvent.create(interprocess=False)
    stream = HandStream()
    event.record(stream)  # type: ignore[arg-type]
    first, work = event.latest, stream.work
    del stream
    other = HandStream()
    event.record(other)  # type: ignore[arg-type]
    other.step()
    assert event.done(event.latest)
    assert not event.done(first)
    work.pop()[0](*first)
    assert event.done(first)
