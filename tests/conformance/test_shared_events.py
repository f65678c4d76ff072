"""Layer 2, shared events: every rule once, on every backend, in real processes."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, SharedEvent, errors

from ..harness import Child, Peer, wait_until
from .cases import Case

Spawn = Callable[..., Child]
CUDA = pytest.mark.cuda


class EventCase(Case):
    """A device, and how its streams wait."""

    def __init__(self, device: str, via: str) -> None:
        super().__init__(device)
        self.via: Any = via

    def create(self, session: Session, name: str = "frame", **options: Any) -> SharedEvent:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # cuda-event says what it cannot promise
            return session.create_event(name, device=self.device, via=self.via, **options)

    @property
    def survives_death(self) -> bool:
        """A CUDA event whose recorder is killed can never be released."""
        return bool(self.via != "cuda-event")


@pytest.fixture(
    params=[
        ("cpu", "auto"),
        pytest.param(("cuda", "timeline"), marks=CUDA),
        pytest.param(("cuda", "auto"), marks=CUDA),
        pytest.param(("cuda", "cuda-event"), marks=CUDA),
    ],
    ids=["host", "cuda-timeline", "cuda-auto", "cuda-event"],
)
def case(request: pytest.FixtureRequest, runtime: Path) -> Iterator[EventCase]:
    made = EventCase(*request.param)
    yield made
    made.close()


# -- rounds


def test_rounds_count_from_one_and_complete_in_order(case: EventCase, session: Session) -> None:
    event, stream = case.create(session), case.stream()
    assert (event.issued, event.completed, event.query()) == (0, 0, False)
    gate = case.hold(stream)
    assert [event.record(stream) for _ in range(3)] == [1, 2, 3]
    assert event.issued == 3
    assert event.completed == 0
    assert not event.query(round=1)
    gate.open()
    event.synchronize(round=2)
    event.synchronize()
    assert event.completed == 3
    assert event.query()
    assert event.query(round=3)
    assert not event.query(round=4)


def test_a_wait_is_satisfied_by_a_later_round(case: EventCase, session: Session) -> None:
    event, stream = case.create(session), case.stream()
    for _ in range(5):
        event.record(stream)
    other = case.stream()
    event.wait(other, round=2)
    other.synchronize()
    event.synchronize(round=1)


def test_rounds_of_a_fast_stream_do_not_overtake_a_slow_ones(case: EventCase, session: Session) -> None:
    event, slow, fast = case.create(session), case.stream(), case.stream()
    gate = case.hold(slow)
    event.record(slow)
    event.record(fast)
    with pytest.raises(errors.WaitTimeout):  # were round 2 to complete first, it would take round 1's waiters with it
        event.synchronize(round=1, timeout=0.05)
    gate.open()
    event.synchronize(round=2)
    assert event.completed == 2


def test_the_host_does_not_wait_for_the_work(case: EventCase, session: Session) -> None:
    """With a stream held, record and wait both come back: were they to wait, nobody would open the gate."""
    event, stream, other = case.create(session), case.stream(), case.stream()
    gate = case.hold(stream)
    n = event.record(stream)
    event.wait(other, round=n)
    behind = case.create(session, "behind")
    behind.record(other)
    with pytest.raises(errors.WaitTimeout):  # a stream may look busy for a moment, also one that waits for nothing
        behind.synchronize(timeout=0.05)
    gate.open()
    behind.synchronize()


# -- waits that come first


def _records_when_told(peer: Peer, name: str, device: str) -> None:
    with ipcsync.connect(name="recorder") as session:
        event = session.open_event(name)
        stream = ipcsync.Stream(device)
        peer.send("ready")
        while peer.recv() == "record":
            peer.send(event.record(stream))
        stream.synchronize()


def test_a_wait_before_the_record_waits_for_it(case: EventCase, session: Session, spawn: Spawn) -> None:
    event = case.create(session)
    child = spawn(_records_when_told, "frame", case.device)
    child.recv()
    done = threading.Event()

    def wait() -> None:
        stream = case.stream()
        event.wait(stream)
        stream.synchronize()
        done.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    assert not done.wait(0.1), "it passed silently: there is no record yet"
    child.send("record")
    assert child.recv() == 1
    assert done.wait(30)
    waiter.join()
    child.send("end")
    child.join()


def test_block_false_never_waits_on_the_host(case: EventCase, session: Session) -> None:
    event, stream, other = case.create(session), case.stream(), case.stream()
    with pytest.raises(errors.WouldBlock):
        event.wait(other, block=False)
    gate = case.hold(stream)
    event.record(stream)
    event.wait(other, block=False)
    assert not other.query()
    gate.open()
    other.synchronize()


def test_a_timeout_enqueues_nothing(case: EventCase, session: Session) -> None:
    event, other = case.create(session), case.stream()
    with pytest.raises(errors.WaitTimeout) as caught:
        event.wait(other, round=1, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    other.synchronize()
    with pytest.raises(errors.WaitTimeout):
        event.synchronize(timeout=0.05)
    stream = case.stream()
    gate = case.hold(stream)
    event.record(stream)
    with pytest.raises(errors.WaitTimeout):
        event.synchronize(round=1, timeout=0.05)
    gate.open()


def test_a_reference_names_a_round_anywhere(case: EventCase, session: Session, spawn: Spawn) -> None:
    event, stream = case.create(session), case.stream()
    gate = case.hold(stream)
    reference = event.ref(event.record(stream))
    child = spawn(_waits_for_reference, bytes(reference), case.device)
    assert child.recv() == "waiting"
    gate.open()
    child.join()
    with pytest.raises(errors.InvalidArgument):
        session.wait(b"no reference", stream)


def _waits_for_reference(peer: Peer, reference: bytes, device: str) -> None:
    with ipcsync.connect(name="waiter") as session:
        stream = ipcsync.Stream(device)
        session.wait(reference, stream)
        peer.send("waiting")
        stream.synchronize()


# -- the pen


def test_one_recorder_at_a_time(case: EventCase, session: Session, spawn: Spawn) -> None:
    event = case.create(session)
    event.record()
    child = spawn(_records_when_told, "frame", case.device)
    child.recv()
    child.send("record")
    with pytest.raises(errors.RecorderBusy) as caught:
        child.recv()
    assert caught.value.pid == os.getpid()
    assert caught.value.session == session.name


def test_the_pen_goes_from_hand_to_hand_and_the_count_goes_on(case: EventCase, session: Session, spawn: Spawn) -> None:
    event, stream = case.create(session), case.stream()
    child = spawn(_records_when_told, "frame", case.device)
    child.recv()
    gate = case.hold(stream)
    event.record(stream)
    with pytest.raises(errors.WaitTimeout):
        event.release(timeout=0.05)  # not while what it issued is pending
    gate.open()
    event.release()
    child.send("record")
    assert child.recv() == 2
    event.synchronize(round=2)
    with pytest.raises(errors.RecorderBusy):
        event.record(stream)
    child.send("end")
    child.join()
    assert event.record(stream) == 3, "closing let the pen go"


# -- names


def test_names_and_specifications(case: EventCase, session: Session) -> None:
    event = case.create(session)
    with pytest.raises(errors.NameInUse):
        case.create(session)
    again = case.create(session, exist_ok=True)
    assert event.record() == 1
    assert again.issued == 1
    for bad in ("", "a b", "x" * 121, "ä", "a/b"):
        with pytest.raises(errors.InvalidArgument):
            case.create(session, bad)
    with pytest.raises(errors.NotFound) as caught:
        session.open_event("nobody", timeout=0.05)
    assert isinstance(caught.value, TimeoutError)


def test_namespaces_keep_names_apart(case: EventCase, session: Session) -> None:
    case.create(session)
    with ipcsync.connect(namespace="other") as elsewhere:
        with pytest.raises(errors.NotFound):
            elsewhere.open_event("frame", timeout=0.05)
        case.create(elsewhere)


def test_open_waits_until_the_name_is_published(case: EventCase, session: Session, spawn: Spawn) -> None:
    child = spawn(_records_when_told, "late", case.device)
    case.create(session, "late")
    assert child.recv() == "ready"
    child.send("end")
    child.join()


# -- death


def _records_and_hangs(peer: Peer, name: str, device: str, complete: int) -> None:
    case = Case(device)
    session = ipcsync.connect(name="victim")
    event, stream = session.open_event(name), case.stream()
    for _ in range(complete):
        event.record(stream)
    event.synchronize() if complete else None
    case.hold(stream)
    event.record(stream)
    peer.send("recorded")
    peer.recv()


def test_a_killed_recorder_ends_its_rounds(case: EventCase, session: Session, spawn: Spawn) -> None:
    if not case.survives_death:
        return  # what it cannot promise: said at creation, and tested there
    event, stream = case.create(session), case.stream()
    child = spawn(_records_and_hangs, "frame", case.device, 2)
    child.recv()
    event.wait(stream, round=3)
    assert not stream.query()
    raised: list[Exception] = []
    waits = [
        threading.Thread(target=_collect, args=(raised, lambda r=r: event.synchronize(round=r, timeout=None)))
        for r in (3, 4, 9)
    ]
    for wait in waits:
        wait.start()
    child.kill()
    for wait in waits:
        wait.join(30)
    assert [type(error) for error in raised] == [errors.PeerDied] * 3
    assert {(error.session, error.pid, error.round) for error in raised} == {("victim", child.pid, 3)}
    stream.synchronize()  # released, and of use again
    for call in (lambda: event.wait(stream, round=3), lambda: event.query(round=3), lambda: event.record(stream)):
        with pytest.raises((errors.PeerDied, errors.StaleHandle)):
            call()
    event.synchronize(round=2)  # what completed stays true
    assert event.completed == 2
    assert isinstance(pickle.loads(pickle.dumps(raised[0])), errors.PeerDied)


def _collect(raised: list[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        raised.append(error)


def test_the_name_is_free_again_and_old_handles_stay_dead(case: EventCase, session: Session, spawn: Spawn) -> None:
    old = case.create(session)
    child = spawn(_records_and_hangs, "frame", case.device, 0)
    child.recv()
    child.kill()
    with pytest.raises(errors.PeerDied):
        old.synchronize(round=1)
    new = wait_until(lambda: _created(case, session), "the name's being free")
    assert new.record() == 1
    with pytest.raises((errors.PeerDied, errors.StaleHandle)):
        old.wait(round=1)
    with pytest.raises(errors.StaleHandle):
        session.wait(old.ref(1))


def _created(case: EventCase, session: Session) -> SharedEvent | None:
    try:
        return case.create(session)
    except errors.NameInUse:
        return None


def _passes_on(peer: Peer, source: str, target: str, device: str) -> None:
    """B of the chain: waits on its stream for `source`, and records `target` behind it. Its host waits for nothing."""
    session = ipcsync.connect(name=f"link-{target}")
    incoming, outgoing, stream = session.open_event(source), session.open_event(target), ipcsync.Stream(device)
    incoming.wait(stream, round=1)
    peer.send(outgoing.record(stream))
    peer.recv()
    try:
        incoming.synchronize(round=1)
    except errors.PeerDied as error:
        peer.send(error.session)
    stream.synchronize()
    peer.recv()


def test_a_chain_is_condemned_to_its_end(case: EventCase, session: Session, spawn: Spawn) -> None:
    if not case.survives_death:
        return
    events = [case.create(session, name) for name in "abcd"]
    first = spawn(_records_and_hangs, "a", case.device, 0)
    first.recv()
    links = []
    for source, target in ("ab", "bc", "cd"):
        links.append(spawn(_passes_on, source, target, case.device))
        assert links[-1].recv() == 1
    first.kill()
    for event in events:
        with pytest.raises(errors.PeerDied) as caught:
            event.synchronize(round=1)
        assert caught.value.session == "victim"
    for link, culprit in zip(links, ("victim",) * 3, strict=True):
        link.send()
        assert link.recv() == culprit
        link.send()
        link.join()


def test_a_recorder_whose_input_died_is_told_at_its_next_record(
    case: EventCase, session: Session, spawn: Spawn
) -> None:
    """Its stream ran on over data that was never finished; what it had complete and nothing begun is not condemned."""
    if not case.survives_death:
        return
    source, mine = case.create(session, "source"), case.create(session, "mine")
    child = spawn(_records_and_hangs, "source", case.device, 0)
    child.recv()
    stream = case.stream()
    mine.record(stream)
    mine.synchronize()
    source.wait(stream, round=1)
    child.kill()
    with pytest.raises(errors.PeerDied):
        source.synchronize(round=1)
    with pytest.raises(errors.PeerDied):
        mine.record(stream)
    stream.synchronize()
    assert mine.record(stream) == 2, "once told, it goes on"
    mine.synchronize(round=2)


def test_a_stopped_session_is_taken_for_dead_and_told(case: EventCase, session: Session, spawn: Spawn) -> None:
    event = case.create(session)
    child = spawn(_stops, "frame", case.device)
    child.recv()
    child.kill(signal.SIGSTOP)
    try:
        with pytest.raises(errors.PeerDied):
            event.synchronize(round=2, timeout=20)
    finally:
        child.kill(signal.SIGCONT)
    child.send()
    assert child.join() in ("PeerDied", "StaleHandle", "SessionClosed")


def _stops(peer: Peer, name: str, device: str) -> str:
    session = ipcsync.connect(name="sleeper")
    event = session.open_event(name)
    event.record()
    peer.send("recorded")
    peer.recv()
    try:
        event.record()
    except errors.IpcSyncError as error:
        return type(error).__name__
    return "not told"


# -- the session's end


def test_close_wakes_whoever_waits(case: EventCase, session: Session) -> None:
    case.create(session)
    with ipcsync.connect() as other:
        event = other.open_event("frame")
        raised: list[Exception] = []
        waiting = threading.Thread(target=_collect, args=(raised, lambda: event.synchronize(timeout=None)))
        waiting.start()
        other.close()
        waiting.join(30)
    assert [type(error) for error in raised] == [errors.SessionClosed]
    with pytest.raises(errors.SessionClosed):
        event.wait(round=1)


def test_a_closed_sessions_work_is_drained(case: EventCase, session: Session) -> None:
    event = case.create(session)
    with ipcsync.connect() as other:
        stream = case.stream()
        gate = case.hold(stream)
        theirs = other.open_event("frame")
        theirs.record(stream)
        threading.Timer(0.1, gate.open).start()
    event.synchronize(round=1)
    assert event.record() == 2, "the pen came back"


def test_what_a_close_cannot_drain_is_a_death(case: EventCase, session: Session) -> None:
    event = case.create(session)
    other = ipcsync.connect(name="hasty")
    stream = case.stream()
    gate = case.hold(stream)
    other.open_event("frame").record(stream)
    other.close(timeout=0.1)
    with pytest.raises(errors.PeerDied) as caught:
        event.synchronize(round=1)
    assert caught.value.session == "hasty"
    gate.open()
    stream.synchronize()


def _interrupted(peer: Peer, name: str) -> str:
    with ipcsync.connect() as session:
        event = session.open_event(name)
        try:
            peer.send("waiting")
            event.synchronize(timeout=None)
        except KeyboardInterrupt:
            return "interrupted"
    return "passed"


def test_ctrl_c_ends_a_host_wait(case: EventCase, session: Session, spawn: Spawn) -> None:
    case.create(session)
    child = spawn(_interrupted, "frame")
    child.recv()
    child.kill(signal.SIGINT)
    assert child.join() == "interrupted"


def test_a_forked_child_is_refused(case: EventCase, session: Session) -> None:
    if case.device != "cpu":
        return  # a fork after CUDA has started is not survivable at all
    event = case.create(session)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+: forking with threads; that is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            event.record()
        except errors.ForkedProcess:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert event.record() == 1


# -- a stream that fails (the host's; a CUDA kernel that faults takes its context along)


def test_work_that_raises_condemns_what_was_recorded_behind_it(session: Session, case: EventCase) -> None:
    if case.device != "cpu":
        return
    event, stream, other = case.create(session), case.stream(), case.stream()
    event.record(stream)
    event.synchronize(round=1)
    gate = case.hold(stream)
    stream.enqueue(lambda: 1 / 0)
    event.record(stream)
    event.wait(other, round=2)
    gate.open()
    with pytest.raises(errors.PeerFailed):
        event.synchronize(round=2)
    other.synchronize()
    with pytest.raises(errors.StreamFailed) as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert event.completed == 1


def test_via_cuda_event_says_what_it_cannot_promise(session: Session, case: EventCase) -> None:
    if case.via != "cuda-event":
        if case.device == "cpu":
            with pytest.raises(errors.InvalidArgument):
                session.create_event("other", device="cpu", via="cuda-event")
        return
    with pytest.warns(RuntimeWarning, match="hangs"):
        session.create_event("other", device="cuda", via="cuda-event")
