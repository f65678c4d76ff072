"""Deaths at exact instructions of a channel's writer and readers, by failpoints: nothing hangs, repeats or is torn."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

import ipcsync
from ipcsync import Session
from ipcsync.channel_reader import Reader
from ipcsync.errors import PeerDied

from ..harness import Child, Peer

Spawn = Callable[..., Child]
SHAPE = (64, 64)


def die_at(
    monkeypatch: pytest.MonkeyPatch, where: str, spawn: Spawn, fn: Callable[..., object], *args: object
) -> Child:
    """Spawns a child that is killed at a failpoint; this process's own were read when it started."""
    monkeypatch.setenv("IPCSYNC_FAILPOINTS", where)
    child = spawn(fn, *args)
    monkeypatch.delenv("IPCSYNC_FAILPOINTS")
    return child


def write(peer: Peer, count: int) -> list[int]:
    numbers = []
    with ipcsync.connect(name="writer") as session, session.open_channel("frames").writer() as writer:
        for _ in range(count):
            with writer.slot() as slot:
                slot.array[...] = slot.number
            numbers.append(slot.number or 0)
        writer.detach()
    return numbers


def read(peer: Peer, group: str | None) -> None:
    with ipcsync.connect(name="victim") as session, session.open_channel("frames").reader(group=group) as reader:
        peer.send("attached")
        for slot in reader.slots():
            assert (slot.array == slot.number).all()


def gone(child: Child) -> None:
    child.process.join(30)
    assert child.process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["slot.publish", "record.intent", "record.written"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_writer_dies_while_it_publishes(
    session: Session, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, where: str, nth: int
) -> None:
    """What it had not issued does not exist; the next writer's items are numbered on, none twice."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=8, device="cpu")
    with channel.reader(on_writer_death="wait") as reader, channel.reader() as raising:
        victim = die_at(monkeypatch, f"{where}=kill@{nth}", spawn, write, 5)
        gone(victim)
        writer = spawn(write, 3)
        before: list[int] = []
        after: list[int] = []
        while len(after) < 3:
            with reader.get() as slot:
                assert (slot.array == slot.number).all()
                (before if slot.epoch == 1 else after).append(slot.number)
            if len(before) < nth - 1:
                continue
        assert before[: nth - 1] == list(range(1, nth))
        assert len(before) <= nth
        assert after == writer.join()
        assert after[0] > nth - 1
        for number in before:
            with raising.get() as slot:
                assert slot.number == number
        with pytest.raises(PeerDied):
            raising.get()


def check_all(reader: Reader, numbers: list[int]) -> None:
    for slot in reader.slots(timeout=10):
        assert (slot.array == slot.number).all()
        numbers.append(slot.number)


@pytest.mark.parametrize("where", ["slot.publish", "record.intent", "record.written"])
def test_readers_hear_of_it_with_no_other_writer(
    session: Session, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also when the item's round was complete, but the writer died before it could say that it was issued."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=8, device="cpu")
    numbers: list[int] = []
    with channel.reader() as reader:
        gone(die_at(monkeypatch, f"{where}=kill@3", spawn, write, 5))
        with pytest.raises(PeerDied):
            check_all(reader, numbers)
    assert numbers in ([1, 2], [1, 2, 3])


@pytest.mark.parametrize("where", ["slot.taken", "slot.release"])
@pytest.mark.parametrize("group", [None, "g"])
def test_a_reader_dies_at_its_turn(
    session: Session, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, where: str, group: str | None
) -> None:
    """The writer goes on, everybody else gets everything, and a group loses and repeats nothing."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device="cpu")
    with channel.writer() as writer, channel.reader() as other:
        victim = die_at(monkeypatch, f"{where}=kill@2", spawn, read, group)
        victim.recv()
        shared: list[int] = []
        with channel.reader(group="g") as member:
            # The victim's share is 1 and 2, in which it dies; the member takes what is left.
            for number in range(1, 9):
                with writer.slot() as slot:
                    slot.array[...] = number
                with other.get() as got:
                    assert got.number == number
                    assert (got.array == number).all()
                if number == 2:
                    gone(victim)
                if number >= 2 or group is None:
                    with member.get() as got:
                        assert (got.array == got.number).all()
                        shared.append(got.number)
            writer.close()
            shared += [slot.number for slot in member.slots()]
    if group is None:
        assert shared == list(range(1, 9))
    else:
        assert sorted(shared) == list(range(2, 9)), "the item in which a member died was lost, or another repeated"


def test_a_dead_writers_bytes_never_reach_a_reader(session: Session, spawn: Spawn, runtime: Path) -> None:
    """Killed over and over in the middle of a slot, by a reader who checks every byte of every item."""
    channel = session.create_channel("frames", shape=SHAPE, dtype="int32", depth=2, device="cpu")
    last = 0
    with channel.reader(on_writer_death="wait") as reader:
        for _ in range(4):
            victim = spawn(scribble)
            for _ in range(10):
                with reader.get() as slot:
                    assert slot.number > last
                    assert (numpy.asarray(slot.array) == slot.meta["value"]).all()
                    last = slot.number
            os.kill(victim.pid, signal.SIGKILL)


def scribble(peer: Peer) -> None:
    session = ipcsync.connect(name="scribbler")
    writer = session.open_channel("frames").writer()
    value = os.getpid()
    while True:
        with writer.slot() as slot:
            slot.array[:32] = value
            slot.array[32:] = value
            slot.meta["value"] = value
        value += 1
