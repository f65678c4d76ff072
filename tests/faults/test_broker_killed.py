"""The broker is killed again and again while processes exchange items, and started again each time.

``IPCSYNC_FAULT_BROKER_KILLS`` says how often: 100 on the host and 10 on a GPU for docs/reliability.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import ipcsync
from ipcsync.errors import ResourceLost

from ..harness import Broker, Child, Peer, wait_until
from .bench import DEVICES, LIMITS, Bench, asked, figures, say

KILLS = asked("BROKER_KILLS", 5)


def write(peer: Peer, device: str, memory: Literal["broker", "session"]) -> int:
    """Writes numbered items until told to stop, creating an event now and then: work for the broker as well."""
    bench = Bench(device)
    with ipcsync.connect(name="writer", default_timeout=60.0) as session:
        channel = session.create_channel("numbers", shape=(512,), dtype="uint64", device=device, memory=memory)
        stream = bench.stream()
        peer.send("created")
        peer.recv()
        number = 0
        with channel.writer() as writer:
            while not peer._connection.poll(0):
                number += 1
                with writer.slot(stream, meta={"n": number}) as slot:
                    bench.fill(stream, slot.array, number, 0)
        peer.recv()
        return number


def read(peer: Peer, device: str) -> int:
    """Every item, once, in order, whole."""
    bench = Bench(device)
    with ipcsync.connect(name="reader", default_timeout=60.0) as session:
        expected, stream, copy = 0, bench.stream(), bench.empty(512)
        with session.open_channel("numbers").reader() as reader:
            peer.send("joined")
            for slot in reader.slots(stream):
                expected += 1
                assert slot.meta["n"] == expected
                bench.add(stream, slot.array, copy)
                slot.confirm()
                assert (bench.values(stream, copy) == expected + 1).all()
                if peer._connection.poll(0):
                    peer.recv()
                    peer.send(expected)
        return expected


def control(peer: Peer, device: str) -> None:
    """Calls the broker: each call is answered, by this broker or the next."""
    with ipcsync.connect(name="control", default_timeout=60.0) as session:
        peer.send("connected")
        n = 0
        while True:
            word = peer.recv()
            if word == "stop":
                return
            n += 1
            event = session.create_event(f"event-{n}", timeout=30.0, device=device)
            assert event.record() == 1
            event.synchronize(round=1)
            event.close()
            peer.send(time.monotonic())


@pytest.mark.watchdog(120 + 8 * KILLS)
@pytest.mark.parametrize("memory", ["broker", "session"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_item_is_lost_and_everybody_comes_back(
    runtime: Path, spawn: Callable[..., Child], device: str, memory: str
) -> None:
    broker = Broker(runtime)
    writer = spawn(write, device, memory)
    writer.recv(60)
    reader, controller = spawn(read, device), spawn(control, device)
    reader.recv(60)
    controller.recv(60)
    writer.send("go")
    seen = 0
    back: list[float] = []
    for _ in range(KILLS):
        controller.send("call")  # under way as the broker dies
        broker.kill()
        broker.start()
        began = time.monotonic()  # it accepts connections
        back.append(max(0.0, controller.recv(60) - began))
        reader.send("how far?")
        before, seen = seen, reader.recv(60)
        assert seen > before, "items went on"
    writer.send("stop")
    written = writer.join(60)
    assert reader.join(60) == written
    controller.send("stop")
    controller.join()
    say(f"{written} items, none lost or repeated")
    figures(
        f"broker killed and restarted, {device}, the {memory}'s memory: a call under way is answered after", back, 5.0
    )
    assert not LIMITS or max(back) < 5.0
    assert broker.stop() == 0, broker.log()


def newcomer(peer: Peer) -> str:
    with ipcsync.connect(name="newcomer") as session:
        try:
            with session.open_channel("numbers").reader(start="oldest") as reader, reader.get() as slot:
                return str(int(slot.array[0]))
        except ResourceLost:
            return "told"


@pytest.mark.parametrize("device", DEVICES)
def test_memory_outlives_its_broker_for_whoever_has_it(runtime: Path, spawn: Callable[..., Child], device: str) -> None:
    """Memory of a dead process may be lost to newcomers, as CUDA's can be: they are told, and the others go on."""
    broker, bench = Broker(runtime), Bench(device)
    with ipcsync.connect() as session:
        stream = bench.stream()
        channel = session.create_channel("numbers", shape=(512,), dtype="uint64", device=device)
        array = session.create_array("array", {"a": ipcsync.Field((512,), "uint64")}, device=device)
        with channel.writer() as writer, channel.reader() as reader:
            with array.write(stream) as view:
                bench.fill(stream, view["a"], 1, 0)
            with array.read(stream) as view:
                assert (bench.values(stream, view["a"]) == 1).all()
            broker.kill()
            for path in runtime.glob("mem-*"):  # the host's would not be lost by itself
                path.unlink()
            broker.start()
            for n in range(1, 10):
                with writer.slot(stream) as slot:
                    bench.fill(stream, slot.array, n, 0)
                with reader.get(stream) as slot:
                    assert (bench.values(stream, slot.array) == n).all()
            with array.write(stream) as view:
                bench.fill(stream, view["a"], 2, 0)
            with array.read(stream) as view:
                assert (bench.values(stream, view["a"]) == 2).all()
            came = spawn(newcomer).join()
            say(f"who opens the memory of a dead broker, {device}: {came}")
            assert came == "told" or (device == "cuda" and int(came) in range(1, 10))
            with session.create_channel("another", shape=(4,), dtype="uint64", device=device) as other:
                assert other.depth == 4
    assert broker.stop() == 0, broker.log()


def test_a_greeting_that_dies_with_the_broker_is_said_again(runtime: Path) -> None:
    broker = Broker(runtime)
    with ipcsync.connect(default_timeout=30.0) as session:
        broker.kill()
        # Killed by its second tick, or as it announces that the session is back: before it has answered.
        second = Broker(runtime, env={"IPCSYNC_FAILPOINTS": "broker.publish=kill@2"})
        second.process.wait(30)
        broker.start()
        assert session.create_event("e").issued == 0
    assert broker.stop() == 0


def test_a_session_says_goodbye_to_the_next_broker(runtime: Path) -> None:
    broker = Broker(runtime)
    session = ipcsync.connect()
    session.create_event("e")
    broker.kill()
    broker.start()
    session.close()
    wait_until(lambda: broker.process.poll() is None, "the broker to live")
    assert broker.stop() == 0
