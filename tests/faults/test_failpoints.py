"""SIGKILL at every failpoint, in every role that comes by it: nobody hangs, nothing is left, and what the survivors
have is whole. (Writers and readers with slots in hand: ``test_channel_faults.py``.)"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, errors, failpoints

from ..harness import Broker, Child, Peer, processes_of, wait_until
from ..integration.pipelines import Run, channel, stage, starts
from .test_channel_faults import die_at, gone

Spawn = Callable[..., Child]
RECORDER = ["record.intent", "record.written"]
WRITER = ["slot.publish", *RECORDER]
READER = ["slot.taken", "slot.release", "wait.announced"]
WAITER = ["wait.announced", "condemn.verdict", "condemn.release"]
SUPERVISOR = ["supervisor.channels", "supervisor.started", "supervisor.restart", "supervisor.end"]
BROKER = [
    "broker.before-export",
    "broker.after-export",
    "broker.publish",
    "broker.attach",
    "broker.takeover",
    "journal.write",
    "condemn.verdict",
    "condemn.release",
]


def test_every_failpoint_is_somebodys() -> None:
    assert {*RECORDER, *WRITER, *READER, *WAITER, *SUPERVISOR, *BROKER} == failpoints.NAMES
    assert len(failpoints.NAMES) >= 12


# -- a recorder


def record_many(peer: Peer, name: str) -> None:
    session = ipcsync.connect(name="victim")
    event, stream = session.open_event(name), ipcsync.Stream("cpu")
    while True:
        event.record(stream)
        stream.synchronize()


@pytest.mark.parametrize("where", RECORDER)
def test_a_recorder(session: Session, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    event = session.create_event("e", device="cpu")
    victim = die_at(monkeypatch, f"{where}=kill@3", spawn, record_many, "e")
    waiting = ipcsync.Stream("cpu")
    event.wait(waiting, round=2)
    with pytest.raises(errors.PeerDied, match="victim"):
        event.synchronize(round=4)
    gone(victim)
    waiting.synchronize()
    event.synchronize(round=2)  # what was complete stays true
    assert event.completed in ((2,) if where == "record.intent" else (2, 3))
    event.close()
    again = wait_until(lambda: _made(session, "e"), "the name's being free")
    assert again.record() == 1


def _made(session: Session, name: str) -> Any:
    try:
        return session.create_event(name, device="cpu")
    except errors.NameInUse:
        return None


# -- a waiter


def wait_on_stream(peer: Peer, name: str) -> None:
    session = ipcsync.connect(name="victim")
    event, stream = session.open_event(name), ipcsync.Stream("cpu")
    peer.send("open")
    event.wait(stream, round=1)
    stream.synchronize()
    peer.send("passed")


def test_a_waiter_on_its_stream(session: Session, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    event, stream = session.create_event("e", device="cpu"), ipcsync.Stream("cpu")
    hold = threading.Event()
    stream.enqueue(hold.wait)
    event.record(stream)
    victim = die_at(monkeypatch, "wait.announced=kill", spawn, wait_on_stream, "e")
    other = spawn(wait_on_stream, "e")
    gone(victim)
    assert other.recv() == "open"
    hold.set()
    assert other.recv() == "passed"
    other.join()
    event.synchronize(round=1)
    assert event.record(stream) == 2
    event.release()


def record_and_hang(peer: Peer, name: str) -> None:
    event, stream = ipcsync.connect(name="dead").open_event(name), ipcsync.Stream("cpu")
    stream.enqueue(threading.Event().wait)
    peer.send(event.record(stream))
    signal.pause()


def pass_on(peer: Peer, source: str, target: str) -> None:
    """A link of a chain: records `target` behind a wait for `source`."""
    session = ipcsync.connect(name="link")
    stream = ipcsync.Stream("cpu")
    session.open_event(source).wait(stream, round=1)
    event = session.open_event(target)
    peer.send(event.record(stream))
    with pytest.raises(errors.PeerDied):
        event.synchronize(round=1)
    peer.send("told")


def wait_to_the_end(peer: Peer, name: str) -> None:
    event = ipcsync.connect(name="victim").open_event(name)
    peer.send("open")
    event.synchronize(round=1, timeout=None)


@pytest.mark.parametrize("where", ["condemn.verdict", "condemn.release"])
def test_a_waiter_that_condemns_in_the_brokers_stead(
    runtime: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It dies in it, the verdict written or the chain condemned, and nobody released: the next waiter finishes it."""
    broker = Broker(runtime)
    with ipcsync.connect(name="survivor") as session:
        first, second = (session.create_event(name, device="cpu") for name in ("a", "b"))
        recorder, link = spawn(record_and_hang, "a"), spawn(pass_on, "a", "b")
        assert recorder.recv() == link.recv() == 1
        victim = die_at(monkeypatch, f"{where}=kill", spawn, wait_to_the_end, "a")
        assert victim.recv() == "open"
        broker.kill()
        recorder.kill()
        gone(victim)  # the only waiter that looks
        for event in (first, second):
            with pytest.raises(errors.PeerDied, match="dead"):
                event.synchronize(round=1)
        assert link.recv() == "told"
        link.join()
        broker.start()
        assert session.create_event("c", device="cpu").record() == 1
    assert broker.stop() == 0, broker.log()


# -- a reader whose stream waits, with a slot in hand


def hold_one_and_wait(peer: Peer) -> None:
    stream = ipcsync.Stream("cpu")
    reader = ipcsync.connect(name="victim").open_channel("c").reader()
    peer.send("joined")
    held = reader.get(stream)
    reader.get(stream)
    peer.send(held.number)


def test_a_reader_with_a_slot_in_hand(session: Session, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session.create_channel("c", shape=(64,), dtype="int64", depth=2, device="cpu")
    victim = die_at(monkeypatch, "wait.announced=kill@2", spawn, hold_one_and_wait)
    with opened.reader() as reader, opened.writer() as writer:
        assert victim.recv() == "joined"
        stream, hold = ipcsync.Stream("cpu"), threading.Event()
        stream.enqueue(hold.wait)
        for _ in range(2):
            with writer.slot(stream) as slot:
                stream.enqueue(slot.array.__setitem__, ..., slot.number)
        gone(victim)
        hold.set()
        for number in range(1, 21):
            with reader.get() as got:
                assert got.number == number
                assert (got.array == number).all()
            if number <= 18:
                with writer.slot() as slot:
                    slot.array[...] = slot.number


# -- the supervisor of a pipeline

STAGES = """
import os

def numbers(stage):
    n = 0
    while True:
        with stage.output.slot(meta={"n": n}) as slot:
            slot.array[...] = n
        n += 1
        if n == stage.params.get("items", 0):
            return

def reads(stage):
    for slot in stage.input.slots():
        assert (slot.array == slot.meta["n"]).all()
        if stage.params.get("fails"):
            raise ValueError("a planted failure")
"""


@pytest.fixture
def run(runtime: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starts(tmp_path, STAGES)


@pytest.mark.parametrize("where", SUPERVISOR)
def test_a_supervisor(
    broker: Broker, runtime: Path, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its workers leave with it, and the broker forgets them all."""
    params = {"supervisor.restart": "fails = 1", "supervisor.end": ""}.get(where, "")
    items = "params = { items = 5 }" if where == "supervisor.end" else ""
    text = channel("a") + stage("one", "numbers", outputs="a", more=items)
    text += stage("two", "reads", inputs="a", more=f'restart = "on-failure"\nparams = {{ {params} }}')
    monkeypatch.setenv("IPCSYNC_FAILPOINTS", f"{where}=kill{'@2' if where == 'supervisor.started' else ''}")
    made = run(text)
    monkeypatch.delenv("IPCSYNC_FAILPOINTS")
    assert made.end() == -signal.SIGKILL, made.err
    wait_until(lambda: [pid for pid, _ in processes_of(runtime)] == [broker.pid], "the workers' end")
    with ipcsync.connect() as session:
        wait_until(lambda: not list(runtime.glob("mem-*")) and not list(runtime.glob("ctl-*")), "the channel's end")
        assert session.create_event("e", device="cpu").record() == 1


# -- the broker


def read_all(peer: Peer) -> list[int]:
    numbers = []
    with ipcsync.connect(name="reader") as session, session.open_channel("c").reader() as reader:
        peer.send("joined")
        for slot in reader.slots():
            assert (slot.array == slot.number).all()
            numbers.append(slot.number)
    return numbers


@pytest.mark.parametrize("where", BROKER)
def test_the_broker(runtime: Path, spawn: Spawn, where: str) -> None:
    """Items go on without it, the call that it died in is answered by the next, and the dead are condemned."""
    broker = Broker(runtime)
    with ipcsync.connect(name="writer") as session:
        opened = session.create_channel("c", shape=(64,), dtype="int64", depth=3, device="cpu")
        mortal = session.create_event("mortal", device="cpu")
        reader, victim = spawn(read_all), spawn(record_and_hang, "mortal")
        reader.recv()
        assert victim.recv() == 1
        writer = opened.writer()

        def put() -> None:
            for _ in range(20):
                with writer.slot() as slot:
                    slot.array[...] = slot.number

        put()
        broker.kill()
        broker.env = {"IPCSYNC_FAILPOINTS": f"{where}=kill"}
        if where == "broker.takeover":
            with pytest.raises(AssertionError, match="status -9"):
                broker.start()
        else:
            try:
                broker.start()
            except AssertionError:
                assert broker.process.returncode == -signal.SIGKILL  # it came by there as it took over
        made: list[Any] = []

        def call() -> None:
            made.append(session.create_event("new", device="cpu"))
            session.create_channel("built", shape=(8,), device="cpu")
            made.append(opened.reader())

        calling = threading.Thread(target=call)
        calling.start()
        victim.kill()
        assert broker.process.wait(30) == -signal.SIGKILL
        put()
        broker.env = {}
        broker.start()
        put()
        calling.join(30)
        assert made[0].record() == 1
        with pytest.raises(errors.PeerDied, match="dead"):
            mortal.synchronize(round=1)
        mortal.close()
        assert wait_until(lambda: _made(session, "mortal"), "the name's being free").record() == 1
        made[1].close()
        writer.close()
        assert reader.join() == list(range(1, 61))
    assert broker.stop() == 0, broker.log()
