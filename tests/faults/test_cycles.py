"""Processes connect, make and take things, and are killed: the broker is back where it was, by every gauge.

``IPCSYNC_FAULT_CYCLES`` says how many (50; 1,000 for docs/reliability.md). The same check finds leaks that are planted.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import wire

from ..harness import Broker, Peer, wait_until
from .bench import DEVICES, asked, batch, say
from .nest import starts

CYCLES = asked("CYCLES", 50)
BATCH = asked("BATCH", max(4, min(16, os.cpu_count() or 1)))


def use_everything(peer: Peer, device: str) -> None:
    """An event recorded, a channel written and read, an array, memory of one's own; then it waits for its end."""
    session = ipcsync.connect(name="victim")
    peer.send("ready")
    n = peer.recv(300)
    event = session.create_event(f"e{n}", device=device)
    event.record()
    made = session.create_channel(f"c{n}", shape=(256,), dtype="int64", depth=2, device=device)
    reader, writer = made.reader(), made.writer()
    with writer.slot() as slot:
        slot.array[...] = n
    held = reader.get()
    array = session.create_array(f"a{n}", {"a": ipcsync.Field((256,), "int64")}, device=device)
    with array.write() as view:
        view["a"][...] = n
    own = session.create_channel(f"m{n}", shape=(256,), dtype="int64", depth=2, device=device, memory="session")
    peer.send(held.number)
    signal.pause()
    del own


class Gauges:
    """What the broker holds: descriptors, threads, bytes in the runtime directory, table entries, GPU bytes."""

    def __init__(self, broker: Broker, session: ipcsync.Session, device: str) -> None:
        self.broker, self.session, self.device = broker, session, device

    def read(self) -> dict[str, int]:
        process, directory = Path(f"/proc/{self.broker.pid}"), self.broker.runtime
        status: dict[str, Any] = self.session.request("status", wire.Status(), dict, self.session.deadline())
        found = {
            "descriptors": len(list((process / "fd").iterdir())),
            "threads": len(list((process / "task").iterdir())),
            "bytes": sum(size(path) for path in directory.rglob("*")),
            **{name: status[name] for name in ("sessions_total", "things_total", "cells_in_use")},
        }
        if self.device == "cuda" and os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1":  # of the whole GPU
            import cupy

            free, total = cupy.cuda.runtime.memGetInfo()
            found["gpu bytes"] = (total - free) >> 21  # in steps of 2 MiB, CUDA's own
        return found

    def above(self, before: dict[str, int]) -> dict[str, int]:
        """By how much each is above what it was."""
        return {name: n - before[name] for name, n in self.read().items() if n > before[name]}


def size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def cycle(count: int, device: str) -> None:
    done = 0
    with starts(device) as start:
        while done < count:
            with batch(start, min(BATCH, count - done), use_everything, device) as victims:
                for victim in victims:
                    done += 1
                    victim.send(done)
                    assert victim.recv(60) == 1
                    victim.kill()


@pytest.mark.watchdog(120 + 2 * CYCLES)
@pytest.mark.fresh("broker")
@pytest.mark.parametrize("device", DEVICES)
def test_connecting_and_being_killed_leaves_nothing(broker: Broker, device: str) -> None:
    with ipcsync.connect() as session:
        gauges = Gauges(broker, session, device)
        cycle(BATCH, device)  # the first bring what is loaded once
        wait_until(lambda: gauges.read()["sessions_total"] == 1, "the dead to be gone")
        before = gauges.read()
        cycle(CYCLES, device)
        wait_until(lambda: not gauges.above(before), f"the way back to {before}, from {gauges.read()}")
        say(f"{CYCLES} connect-and-kill cycles, {device}: {gauges.read()}, before {before}")


LEAKS = """
import os, threading
from ipcsync_broker.resources import Resources

free = Resources._free

def leaky(self, thing):
    free(self, thing)
    os.open("/dev/null", os.O_RDONLY)
    (self.directory / f"leak-{thing.incarnation}").write_bytes(bytes(4096))
    threading.Thread(target=threading.Event().wait, daemon=True).start()

Resources._free = leaky
"""


def test_a_planted_leak_is_found(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAKS)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    broker = Broker(runtime, env={"PYTHONPATH": path})
    with ipcsync.connect() as session:
        gauges = Gauges(broker, session, "cpu")
        before = gauges.read()
        cycle(1, "cpu")
        wait_until(lambda: gauges.read()["sessions_total"] == 1, "the dead to be gone")
        wait_until(lambda: {"descriptors", "threads", "bytes"} <= set(gauges.above(before)), "the leaks to show")
    assert broker.stop() == 0
    for left in runtime.glob("leak-*"):
        left.unlink()
