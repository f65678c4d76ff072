"""SIGKILL, many times: whoever waits is told, and what was never finished never passes.

``IPCSYNC_FAULT_KILLS`` says how often (1,000 on the host, 200 on a GPU, for docs/reliability.md). The killed are new
processes, started a batch ahead; whoever waits lives through all of it.
"""

from __future__ import annotations

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
from ipcsync.errors import IpcSyncError, PeerDied, WaitTimeout

from ..harness import Child, Peer, wait_until
from .bench import DEVICES, Bench, Start, asked, batch, figures, say
from .nest import starts

Spawn = Callable[..., Child]
KILLS = asked("KILLS", 12)
BATCH = asked("BATCH", max(4, min(16, os.cpu_count() or 1)))  # started together: that takes a second, a kill hardly
GIB = asked("GIB", 8)
FOR_GOOD = 20_000  # milliseconds of a kernel: nobody lets it end


# -- a recorder with work pending


def recorder(peer: Peer, device: str, gib: int) -> None:
    bench, session = Bench(device), ipcsync.connect(name="victim")
    stream, array = bench.stream(), bench.empty(64)
    resident = numpy.ones(gib << 27, "int64")  # every page of it
    peer.send("ready")
    event = session.open_event(peer.recv())
    bench.fill(stream, array, 1, 0)
    event.record(stream)
    event.synchronize(round=1)
    bench.fill(stream, array, 2, FOR_GOOD)
    peer.send(event.record(stream))
    signal.pause()
    assert len(resident) == gib << 27


def waiter(peer: Peer, device: str, round: int) -> None:
    """Waits for `round` of each event it is told of, on a stream where that is issued, and on the host."""
    bench, session = Bench(device), ipcsync.connect(name=f"waiter-{round}")
    stream = bench.stream()
    peer.send("ready")
    while (name := peer.recv(300)) is not None:
        event = session.open_event(name)
        event.synchronize(round=1)
        event.wait(stream, round=2)
        if bench.device == "cuda" and stream.query():
            raise AssertionError("the stream did not wait")
        peer.send("waiting")
        try:
            event.synchronize(round=round, timeout=25.0)
            told: Any = "it passed"
        except PeerDied as error:
            told = (time.monotonic(), error.pid, error.round)
        stream.synchronize()
        peer.send((told, bench.works(stream), event.completed))
        event.close()


def kill_recorders(session: Session, spawn: Spawn, device: str, kills: int, size: int, gib: int) -> list[float]:
    """Seconds from each SIGKILL to each waiter's PeerDied."""
    with starts(device) as start:
        return _kill_recorders(session, spawn, start, device, kills, size, gib)


def _kill_recorders(
    session: Session, spawn: Spawn, start: Start, device: str, kills: int, size: int, gib: int
) -> list[float]:
    waiters = [spawn(waiter, device, 2), spawn(waiter, device, 3)]  # an issued round, and one that never was
    for each in waiters:
        assert each.recv(60) == "ready"
    took: list[float] = []
    for first in range(0, kills, size):
        with batch(start, min(size, kills - first), recorder, device, gib) as victims:
            for number, victim in enumerate(victims, first):
                event = session.create_event(f"e{number}", device=device)
                victim.send(f"e{number}")
                assert victim.recv() == 2
                for each in waiters:
                    each.send(f"e{number}")
                for each in waiters:
                    assert each.recv() == "waiting"
                began = time.monotonic()
                os.kill(victim.pid, signal.SIGKILL)
                for each in waiters:
                    told, works, completed = each.recv()
                    assert isinstance(told, tuple), told
                    assert (told[1:], works, completed) == ((victim.pid, 2), True, 1)
                    took.append(told[0] - began)
                victim.kill()
                event.close()
    for each in waiters:
        each.send(None)
        each.join()
    return took


@pytest.mark.watchdog(60 + 4 * KILLS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_waiter_is_told_of_a_killed_recorder(session: Session, spawn: Spawn, device: str) -> None:
    took = kill_recorders(session, spawn, device, KILLS, BATCH, 0)
    assert len(took) == 2 * KILLS
    figures(f"killed recorder -> PeerDied, {device}", took, 0.1 if device == "cpu" else 0.15)


@pytest.mark.slow
@pytest.mark.watchdog(300)
@pytest.mark.skipif("KILLS < 100", reason="needs 8 GiB: when IPCSYNC_FAULT_KILLS asks for the long run")
@pytest.mark.parametrize("device", DEVICES)
def test_also_when_it_was_large(session: Session, spawn: Spawn, device: str) -> None:
    took = kill_recorders(session, spawn, device, 5, 1, GIB)
    figures(f"the same with {GIB} GiB resident, {device}", took, 0.1 if device == "cpu" else 0.15)


# -- a chain whose first link is killed in the middle of a kernel

SIZE = 4096
HOPS = 3  # each adds one
#: Milliseconds of A's kernel. On a GPU what was enqueued runs on for a while after its process was killed: three items
#: of a millisecond are complete before anybody knows (seen, 200 times of 200), and nothing of them is wrong.
FILLING = {"cpu": 1.0, "cuda": 30.0}


def source(peer: Peer, device: str) -> None:
    """A: writes numbered arrays, each by a kernel of some time, as fast as its host may enqueue them."""
    bench, session = Bench(device), ipcsync.connect(name="A")
    stream, channel = bench.stream(), session.open_channel("0")
    peer.send("ready")
    value = peer.recv(300)
    writer = channel.writer(timeout=None)
    peer.send("writing")
    while True:
        value += 10
        with writer.slot(stream, {"value": value}, timeout=None) as slot:
            bench.fill(stream, slot.array, value, FILLING[device])


def link(peer: Peer, device: str, hop: int) -> None:
    """B and C: add one on a stream; their hosts never wait for the device. Told of a death, they take a new pen."""
    bench, session = Bench(device), ipcsync.connect(name="BC"[hop])
    stream, target = bench.stream(), session.open_channel(str(hop + 1))
    reader = session.open_channel(str(hop)).reader(on_writer_death="wait")
    peer.send("ready")
    writer = None
    while True:
        try:
            if writer is None:
                writer = target.writer(timeout=None)
            with (
                reader.get(stream, timeout=None) as slot,
                writer.slot(stream, slot.meta, timeout=None) as made,
            ):
                bench.add(stream, slot.array, made.array)
        except PeerDied:
            if writer is not None:
                try:
                    writer.detach()
                except IpcSyncError:
                    pass  # condemned: there is nothing to drain
                writer = None


def sink(peer: Peer, device: str) -> None:
    """D: copies each item, confirms it, and only then looks at the values."""
    bench, session = Bench(device), ipcsync.connect(name="D")
    stream, copy = bench.stream(), bench.empty(SIZE)
    reader = session.open_channel("2").reader(on_writer_death="wait")
    peer.send("ready")
    confirmed = told = 0
    while True:
        if peer._connection.poll(0):
            if peer.recv() is None:
                break
            peer.send((confirmed, told))
        try:
            slot = reader.get(stream, timeout=0.05)
        except WaitTimeout:
            continue
        except PeerDied:
            told += 1
            continue
        try:
            with slot:
                bench.add(stream, slot.array, copy)
                slot.confirm(timeout=25.0)
                expected = slot.meta["value"] + HOPS
                values = bench.values(stream, copy)
                assert (values == expected).all(), f"confirmed: {numpy.unique(values)[:4]}, and {expected} was meant"
                confirmed += 1
        except PeerDied:
            told += 1
    try:
        reader.close()
    except PeerDied:
        pass


@pytest.mark.watchdog(60 + 4 * KILLS)
@pytest.mark.parametrize("device", DEVICES)
def test_what_a_killed_source_never_finished_is_never_confirmed(session: Session, spawn: Spawn, device: str) -> None:
    """A -> B -> C -> D. D sees condemned items, and items of the next A, but confirms none whose content is wrong."""
    seed = asked("SEED", random.randrange(1 << 16))
    rng = random.Random(seed)
    say(f"IPCSYNC_FAULT_SEED={seed}")
    for name in ("0", "1", "2"):
        session.create_channel(name, shape=(SIZE,), dtype="uint64", depth=3, device=device)
    last = spawn(sink, device)
    links = [spawn(link, device, 1), spawn(link, device, 0)]
    for each in (last, *links):
        assert each.recv(60) == "ready"

    def state() -> tuple[int, int]:
        last.send("how far?")
        found: tuple[int, int] = last.recv()
        return found

    kills = 0
    with starts(device) as start:
        while kills < KILLS:
            with batch(start, min(BATCH, KILLS - kills), source, device) as sources:
                for each in sources:
                    kills += 1
                    before, _ = state()
                    each.send(kills * 1_000_000)
                    assert each.recv() == "writing"
                    wait_until(lambda before=before: state()[0] > before, f"an item of source {kills} (seed {seed})")
                    time.sleep(rng.uniform(0.0, 0.004))
                    each.kill()
                    if kills % 100 == 0:
                        say(f"{kills} kills, {state()[0]} items confirmed")
    confirmed, told = state()
    say(f"chain, {device}: {kills} kills, {confirmed} items confirmed and right, {told} times told of a death")
    assert confirmed >= kills
    assert told >= kills / 4, "hardly an item was under way: this proves nothing"
    last.send(None)
    last.join()
    for each in links:
        each.kill()
