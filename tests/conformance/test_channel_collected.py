"""Readers and writers that nobody closed: what is collected lets go, whatever it held and whoever collects it."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.channel import Channel
from ipcsync.channel_place import WriterPlace
from ipcsync.errors import DeviceUnavailable, EndOfStream, PeerFailed, RecorderBusy, WaitTimeout
from ipcsync.waiting import Deadline

from ..harness import TIMEOUT, Broker, Child, Peer, wait_until
from .cases import Case, case  # noqa: F401
from .items import SHAPE, host, same

Spawn = Callable[..., Child]


def make(session: Session, case: Case, depth: int = 2) -> Channel:
    return session.create_channel("frames", shape=SHAPE, dtype="int32", depth=depth, device=case.device)


def put(writer: ipcsync.Writer, count: int = 1) -> None:
    for _ in range(count):
        with writer.slot(timeout=TIMEOUT) as slot:
            slot.array[...] = slot.number


def told(session: Session) -> None:
    """What the collector has to tell has arrived."""
    gc.collect()
    turned = threading.Event()
    session.link.soon(turned.set)
    assert turned.wait(TIMEOUT)


def settled(session: Session) -> None:
    """... and is done: nothing of it is still to come."""
    told(session)
    for thread in threading.enumerate():
        if thread.name == "ipcsync-let-go":
            thread.join(TIMEOUT)
            assert not thread.is_alive()


def full(writer: ipcsync.Writer) -> bool:
    try:
        with writer.slot(timeout=0.05) as slot:
            slot.discard()
    except WaitTimeout:
        return True
    return False


@pytest.mark.parametrize("options", [{}, {"policy": "latest"}, {"group": "all"}], ids=["block", "latest", "group"])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_reader_that_was_dropped_holds_nobody_up(
    case: Case, session: Session, options: dict[str, Any], taken: int
) -> None:
    channel = make(session, case)

    def forgets() -> None:
        reader = channel.reader(start="oldest", **options)
        put(writer, 2)
        for _ in range(taken if options != {"policy": "latest"} else min(taken, 1)):
            reader.get()

    with channel.writer() as writer:
        with pytest.warns(ResourceWarning, match=r"unclosed <ipcsync.Reader of 'frames'.*with channel.reader\(\)"):
            forgets()  # no gc.collect(): it goes with its last reference
        wait_until(lambda: channel.readers == 0, "the reader's end")
        put(writer, 5)


def test_what_can_still_be_used_is_kept(case: Case, session: Session) -> None:
    """A slot, its array, a part of that: as long as one of them is there, nothing is written over."""
    channel = make(session, case)

    def forgets() -> ipcsync.ReadSlot:
        reader = channel.reader()
        put(writer, 2)
        assert reader.get().number == 1
        return reader.get()

    with channel.writer() as writer:
        slot = forgets()
        settled(session)
        assert channel.readers == 1
        assert full(writer)
        assert same(slot.array, 2)
        part = slot.array[1:]
        with pytest.warns(ResourceWarning, match="with channel"):
            del slot
        settled(session)
        assert channel.readers == 1
        assert full(writer)
        row = part[1]
        del part
        settled(session)
        assert channel.readers == 1
        assert (host(row) == 2).all()
        del row
        wait_until(lambda: channel.readers == 0, "the reader's end")
        put(writer, 5)


def test_its_stream_gets_done_with_it_first(case: Case, session: Session) -> None:
    """The stream goes in the same cycle of garbage as the reader, and is still at the item."""
    channel = make(session, case)

    class Stage:
        def __init__(self) -> None:
            self.me, self.stream, self.reader = self, case.stream(), channel.reader()

    with channel.writer() as writer:
        stage = Stage()
        put(writer)
        slot = stage.reader.get(stage.stream)
        gate = case.hold(stage.stream)
        copy = case.copy_later(stage.stream, slot.array)
        gone = weakref.ref(stage)
        del slot, stage
        with pytest.warns(ResourceWarning, match="with channel"):
            gc.collect()
        assert gone() is None
        others = case.stream()

        def write_on() -> None:  # its host may go on (on a GPU), but not its stream
            for _ in range(4):
                with writer.slot(others, timeout=TIMEOUT) as slot:
                    case.fill(others, slot.array, -1)

        thread = threading.Thread(target=write_on)
        thread.start()
        wait_until(lambda: writer._timeline.issued >= 2, "the write into the other buffer")
        told(session)
        assert channel.readers == 1
        gate.open()
        wait_until(lambda: channel.readers == 0, "the reader's end")
        thread.join(TIMEOUT)
        others.synchronize()
        assert same(copy, 1)


def test_the_collector_may_come_in_anywhere(session: Session) -> None:
    """Whatever lock the thread holds that it comes in, nothing there waits for it."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device="cpu")
    locks = [session._lock, session.link._lock, channel._lock, threading._active_limbo_lock]  # type: ignore[attr-defined]
    with channel.writer() as writer:
        for lock in locks:
            reader = channel.reader()
            put(writer)
            reader.get()
            with pytest.warns(ResourceWarning), lock:
                del reader
            wait_until(lambda: channel.readers == 0, "the reader's end")
        for _ in range(3):  # in the I/O thread itself
            box = [channel.reader()]
            put(writer)
            box[0].get()
            done = threading.Event()

            def drop(box: list[ipcsync.Reader] = box, done: threading.Event = done) -> None:
                box.clear()
                done.set()

            with pytest.warns(ResourceWarning):
                _soon(session, drop, done)
            wait_until(lambda: channel.readers == 0, "the reader's end")


def _soon(session: Session, call: Callable[[], None], done: threading.Event) -> None:
    session.link.soon(call)
    assert done.wait(TIMEOUT)


def test_many_are_dropped_at_once(session: Session) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device="cpu", max_readers=64)
    with channel.writer() as writer:
        readers = [channel.reader() for _ in range(64)]
        put(writer)
        for reader in readers:
            reader.get()
        del reader
        with pytest.warns(ResourceWarning):
            readers.clear()
        put(writer, 5)
        wait_until(lambda: channel.readers == 0, "their end")
        with channel.reader():
            assert channel.readers == 1


def test_nothing_is_written_over_however_readers_are_dropped(session: Session) -> None:
    """Threads take items on streams and without, drop the reader, and look at what they have kept of its arrays, while
    a writer writes as fast as it can."""
    channel = session.create_channel("frames", shape=(64,), dtype="int64", depth=8, device="cpu", max_readers=64)
    wrong: list[tuple[int, int]] = []
    over = threading.Event()

    def write() -> None:
        with channel.writer() as writer:
            while not over.is_set():
                put(writer)

    def take(random: Random) -> list[tuple[Any, int]]:
        reader = channel.reader(policy=random.choice(["block", "latest"]), start=random.choice(["next", "oldest"]))
        for _ in range(random.randrange(4)):
            stream = random.choice([None, ipcsync.Stream("cpu")])
            slot = reader.get(stream, timeout=TIMEOUT)
            if stream is not None:
                stream.synchronize()
            if random.random() < 0.3:  # one at most: else all buffers could be somebody's who waits for more
                return [(slot.array[2:], slot.number)]
            if not (slot.array == slot.number).all():
                wrong.append((slot.number, int(slot.array[0])))
            slot.release()
        if random.random() < 0.3:
            reader.close()
        return []

    def read(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            for array, number in take(random):
                threading.Event().wait(random.random() * 0.002)  # time for the writer to come round
                if not (array == number).all():
                    wrong.append((number, int(array[0])))
            array = None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        writing = threading.Thread(target=write)
        for thread in (writing, *threads):
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        settled(session)
    over.set()
    writing.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in (writing, *threads))
    assert not wrong
    wait_until(lambda: channel.readers == 0, "their end")


def test_a_member_that_was_dropped_leaves_the_rest_to_the_others(case: Case, session: Session) -> None:
    channel = make(session, case, depth=4)
    with channel.reader(group="all", start="oldest") as kept:
        with channel.writer() as writer:
            other = channel.reader(group="all")
            put(writer, 3)
            assert other.get().number == 1
            with pytest.warns(ResourceWarning):
                del other
            assert [kept.get().number for _ in range(2)] == [2, 3]
        with pytest.raises(EndOfStream):
            kept.get()


def test_without_a_broker_the_writer_goes_on(session: Session, broker: Broker) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device="cpu")
    writer = channel.writer()
    reader = channel.reader()
    put(writer)
    reader.get()
    broker.kill()
    with pytest.warns(ResourceWarning):
        del reader
    put(writer, 5)
    broker.start()
    wait_until(lambda: channel.readers == 0, "the reader's end")
    writer.close()


def test_what_is_closed_is_not_warned_of(session: Session) -> None:
    """Warnings are errors here, and an error in a finaliser fails the test."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device="cpu")
    with channel.reader(), channel.writer():
        pass
    late = ipcsync.connect(name="late")
    other = late.create_channel("others", shape=SHAPE, dtype="int32", device="cpu")
    reader, writer = other.reader(), other.writer()
    late.close()
    del reader, writer
    settled(session)


def test_a_reader_that_could_not_be_made_is_none(session: Session) -> None:
    if _cuda():
        pytest.skip("pin=True works here")
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device="cpu")
    with channel.writer() as writer:
        with pytest.raises(DeviceUnavailable):
            channel.reader(pin=True)
        wait_until(lambda: channel.readers == 0, "its end")
        put(writer, 5)


def _cuda() -> bool:
    from ipcsync.backends import select

    return select.has_cuda()


# -- writers


def writes(channel: Channel, count: int) -> None:
    writer = channel.writer()
    put(writer, count)


def write_to_the_end(peer: Peer, count: int) -> None:
    with ipcsync.connect(name="other") as session, session.open_channel("frames").writer() as writer:
        put(writer, count)


def write_and_forget(peer: Peer, count: int) -> None:
    with ipcsync.connect(name="forgets") as session:
        with pytest.warns(ResourceWarning, match=r"<ipcsync.Writer of 'frames'.*detach\(\) \(it goes on\)"):
            writes(session.open_channel("frames"), count)
        peer.send("forgotten")
        peer.recv()


def test_a_writer_that_was_dropped_has_not_ended_the_stream(case: Case, session: Session, spawn: Spawn) -> None:
    channel = make(session, case, depth=8)
    with channel.reader() as reader:
        with pytest.warns(ResourceWarning):
            writes(channel, 2)
        assert [reader.get().number for _ in range(2)] == [1, 2]
        with pytest.raises(WaitTimeout):
            reader.get(timeout=0.1)
        with pytest.warns(ResourceWarning):
            wait_until(lambda: _took(channel), "the pen")  # and drops it again
        spawn(write_to_the_end, 3).join()
        assert [reader.get().number for _ in range(3)] == [3, 4, 5]
        with pytest.raises(EndOfStream):
            reader.get()


def _took(channel: Channel) -> bool:
    try:
        channel.writer()
    except RecorderBusy:
        return False
    return True


def test_it_ends_with_its_session_where_nobody_wrote_on(session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=8, device="cpu")
    with channel.reader() as reader:
        child = spawn(write_and_forget, 2)
        assert child.recv() == "forgotten"
        assert [reader.get().number for _ in range(2)] == [1, 2]
        with pytest.raises(WaitTimeout):
            reader.get(timeout=0.1)
        child.send()
        child.join()
        with pytest.raises(EndOfStream):
            reader.get()


def fails(peer: Peer, *, collected: bool) -> None:
    try:
        with ipcsync.connect(name="fails") as session:
            channel = session.open_channel("frames")
            if collected:
                with pytest.warns(ResourceWarning):
                    writes(channel, 2)
            else:
                writer = channel.writer()
                put(writer, 2)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def fails_collected(peer: Peer) -> None:
    fails(peer, collected=True)


def fails_kept(peer: Peer) -> None:
    fails(peer, collected=False)


@pytest.mark.parametrize("how", [fails_collected, fails_kept])
def test_a_session_that_an_exception_ends_ends_no_stream_well(
    session: Session, spawn: Spawn, how: Callable[[Peer], None]
) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=8, device="cpu")
    with channel.reader() as reader:
        spawn(how).join()
        assert [reader.get().number for _ in range(2)] == [1, 2]
        with pytest.raises(PeerFailed):
            reader.get()


def test_a_session_that_is_closed_while_it_lets_go_ends_the_stream(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=8, device="cpu")
    entered, leave = threading.Event(), WriterPlace.leave

    def meet(self: WriterPlace, end: Any, deadline: Deadline) -> bool:
        entered.set()
        if end:
            wait_until(lambda: self.closed, "the other thread's leaving")
        else:
            wait_until(lambda: self.session.closed, "the close")
        return leave(self, end, deadline)

    monkeypatch.setattr(WriterPlace, "leave", meet)
    other = ipcsync.connect(name="other")
    with channel.reader() as reader:
        with pytest.warns(ResourceWarning):
            writes(other.open_channel("frames"), 2)
        assert entered.wait(TIMEOUT)
        other.close()
        assert [reader.get().number for _ in range(2)] == [1, 2]
        with pytest.raises(EndOfStream):
            reader.get()


def test_it_does_not_end_what_another_wrote_on(session: Session, spawn: Spawn) -> None:
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=8, device="cpu")
    with channel.reader() as reader:
        child = spawn(write_and_forget, 2)
        assert child.recv() == "forgotten"
        wait_until(lambda: _wrote(channel), "the pen")
        child.send()
        child.join()
        assert [reader.get().number for _ in range(3)] == [1, 2, 3]
        with pytest.raises(WaitTimeout):
            reader.get(timeout=0.1)


def _wrote(channel: Channel) -> bool:
    try:
        writer = channel.writer()
    except RecorderBusy:
        return False
    put(writer)
    writer.detach()
    return True


def test_the_next_writer_does_not_meet_what_it_still_writes(case: Case, session: Session) -> None:
    channel = make(session, case)
    stream = case.stream()

    gates: list[Any] = []

    def forgets() -> None:
        slot = channel.writer().slot(stream).__enter__()
        gates.append(case.hold(stream))
        case.fill(stream, slot.array, -1)

    def in_a_thread() -> None:  # in which the stream stays current for good
        thread = threading.Thread(target=forgets)
        thread.start()
        thread.join(TIMEOUT)

    with channel.reader() as reader:
        with pytest.warns(ResourceWarning):
            in_a_thread()
        (gate,) = gates
        with pytest.raises(RecorderBusy):
            channel.writer()
        gate.open()
        wait_until(lambda: _wrote(channel), "the pen")
        with reader.get() as slot:
            assert same(slot.array, 1)


def test_a_program_that_forgets_says_nothing_at_its_end(runtime: Any, broker: Broker) -> None:
    program = """
        import ipcsync
        session = ipcsync.connect()
        channel = session.create_channel("frames", shape=(4,), dtype="int32", device="cpu")
        reader, writer = channel.reader(), channel.writer()
        with writer.slot() as slot:
            slot.array[...] = 1
        slot = reader.get()
        array = slot.array
        def inner():
            channel.reader()
        inner()
    """
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-X", "faulthandler", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
