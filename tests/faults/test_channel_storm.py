"""A storm over one channel: writers and readers of every kind are killed at random, by seed, and everything they saw is
checked against what a channel promises. A run in which too little happened fails: it would prove nothing."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import IpcSyncError, PeerDied

from ..harness import Child, Peer

Spawn = Callable[..., Child]
SECONDS = float(os.environ.get("IPCSYNC_STORM_SECONDS", "6"))
DEPTH = 8
SEEDS = [int(seed) for seed in os.environ.get("IPCSYNC_STORM_SEEDS", "1,2").split(",")]


def write(peer: Peer, seed: int) -> None:
    """Writes until it is killed; now and then it throws an item away, or detaches and comes back."""
    rng = random.Random(seed)
    session = ipcsync.connect(name="writer")
    channel = session.open_channel("storm")
    stream = ipcsync.Stream("cpu") if seed % 2 else None
    while True:
        writer = channel.writer(timeout=None)
        for _ in range(rng.randrange(20, 200)):
            with writer.slot(stream, timeout=None) as slot:
                if rng.random() < 0.1:
                    slot.array[...] = -1
                    slot.discard()
                    continue
                slot.meta["n"] = slot.number
                if stream is None:
                    slot.array[...] = slot.number
                else:
                    stream.enqueue(slot.array.__setitem__, ..., slot.number)
        writer.detach(timeout=None)


def read(peer: Peer, seed: int, kind: str) -> None:
    """Reads until it is killed, and says what it saw: (epoch, number, skipped)."""
    rng = random.Random(seed)
    options: dict[str, Any] = {"latest": {"policy": "latest"}, "group": {"group": "g"}}.get(kind, {})
    session = ipcsync.connect(name=kind)
    stream = ipcsync.Stream("cpu") if seed % 3 == 0 and kind != "group" else None
    with session.open_channel("storm").reader(on_writer_death="wait", **options) as reader:
        peer.send("joined")
        held: list[Any] = []
        while True:
            try:
                slot = reader.get(stream, timeout=None)
                slot.confirm(timeout=None)
            except PeerDied:
                continue  # said at a commit point: what was taken last was never finished
            values = numpy.unique(slot.array)
            assert values.tolist() == [slot.number], f"{kind}: item {slot.number} holds {values}"
            assert slot.meta == {"n": slot.number}
            peer.send((slot.epoch, slot.number, slot.skipped))
            held.append(slot)
            if len(held) > rng.randrange(3):
                held.pop(rng.randrange(len(held))).release()


class Log:
    """What one reader saw, and who it is."""

    def __init__(self, child: Child, kind: str) -> None:
        self.child, self.kind = child, kind
        self.seen: list[tuple[int, int, int]] = []

    def drain(self) -> None:
        connection = self.child._connection
        try:
            while connection.poll(0):
                kind, value, text = connection.recv()
                assert kind == "value", f"a reader ended: {value!r}\n{text}"
                if value != "joined":
                    self.seen.append(value)
        except (EOFError, ConnectionResetError):
            pass  # killed

    def check(self) -> None:
        last_epoch = last = 0
        for epoch, number, skipped in self.seen:
            assert number > last or self.kind == "group", f"{self.kind}: {number} came after {last}"
            assert epoch >= last_epoch or self.kind == "group"
            if self.kind == "block" and epoch == last_epoch:
                assert number == last + 1, f"block: {number} came after {last} of the same writer"
            if self.kind == "latest" and epoch == last_epoch:
                assert number == last + 1 + skipped
            last_epoch, last = epoch, number


@pytest.mark.watchdog(120 + int(3 * SECONDS))
@pytest.mark.parametrize("seed", SEEDS)
def test_storm(session: Session, spawn: Spawn, seed: int) -> None:
    rng = random.Random(seed)
    session.create_channel("storm", shape=(64, 64), dtype="int64", depth=DEPTH, device="cpu")
    count = 0

    def start(kind: str) -> Log:
        nonlocal count
        count += 1
        return Log(spawn(read, 1000 * seed + count, kind), kind)

    steady = start("group")  # while it lives, its group loses nothing
    assert steady.child.recv() == "joined"
    alive = [start(kind) for kind in ("block", "latest", "group", "group")]
    done: list[Log] = []
    writer, writers = spawn(write, seed), 1
    until = time.monotonic() + SECONDS
    next_death = time.monotonic() + 1.0
    while time.monotonic() < until:
        for log in (steady, *alive):
            log.drain()
        time.sleep(0.005)
        if time.monotonic() > next_death:
            next_death = time.monotonic() + rng.uniform(0.1, 0.6)
            if rng.random() < 0.5:
                writer.kill()
                writers += 1
                writer = spawn(write, seed + writers)
            else:
                victim = alive.pop(rng.randrange(len(alive)))
                victim.child.kill()
                victim.drain()
                done.append(victim)
                alive.append(start(victim.kind))
    writer.kill(signal.SIGKILL)
    time.sleep(0.1)
    alive.append(steady)
    for log in alive:
        log.drain()
        log.child.kill()
        log.drain()
    logs = done + alive
    for log in logs:
        log.check()
    shared = sorted((epoch, number) for log in logs if log.kind == "group" for epoch, number, _ in log.seen)
    for (epoch, number), (next_epoch, next_number) in itertools.pairwise(shared[: -2 * DEPTH]):
        assert epoch != next_epoch or next_number <= number + 1, f"the group never saw {number + 1} of epoch {epoch}"
    repeated = len(shared) - len(set(shared))
    deaths_in_group = sum(log.kind == "group" for log in done) + 3
    # A member that is killed between its message and its release has its items given again: at most those it held.
    assert repeated <= 3 * deaths_in_group, "a group's items were repeated"
    assert len(logs) > 4, "nobody died"
    assert writers > 1, "no writer died"
    assert sum(len(log.seen) for log in logs) > 200, "too little was read to prove anything"
    try:
        session.open_channel("storm").close()
    except IpcSyncError as error:
        raise AssertionError("the channel did not survive") from error
