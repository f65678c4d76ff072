"""A storm over events, a channel and an array: by seed, processes are killed, stopped and armed with failpoints, the
broker too, and what everybody saw is held against a model. A run in which too little happened fails.

``IPCSYNC_FAULT_SECONDS`` (10) says how long, ``IPCSYNC_FAULT_SEED`` which storm: a failure names its seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.shm import Region

from ..harness import Broker, Child
from .bench import asked, say
from .model import Logs, check, too_little
from .storm import ACTORS, DEPTH, PLACES, actor

SECONDS = asked("SECONDS", 10)
SEED = asked("SEED", random.SystemRandom().randrange(1 << 20))
BACK = 4.0  # seconds that sessions get to come back to a new broker before that may die
CAST = [*ACTORS, "group", "record", "wait", "look"]
#: What a process of the storm may be armed with; the broker's own kill the broker.
PLACES_TO_DIE = {
    "write": ["slot.publish", "record.intent", "record.written"],
    "block": ["slot.taken", "slot.release"],
    "latest": ["slot.taken", "slot.release"],
    "group": ["slot.taken", "slot.release"],
    "record": ["record.intent", "record.written"],
    "wait": ["wait.announced"],
    "change": ["record.intent", "record.written"],
    "look": [],
}
BROKER_PLACES = ["broker.after-export", "broker.publish", "broker.attach", "journal.write", "condemn.verdict"]


@contextmanager
def armed(where: str) -> Iterator[None]:
    """What is started within is killed there."""
    os.environ["IPCSYNC_FAILPOINTS"] = where
    try:
        yield
    finally:
        del os.environ["IPCSYNC_FAILPOINTS"]


class Storm:
    """The processes, and what befalls them."""

    def __init__(self, folder: Path, seed: int, broker: Broker) -> None:
        self.folder, self.rng, self.broker = folder, random.Random(seed), broker
        self.alive: dict[int, tuple[str, Child]] = {}
        self.stopped: list[tuple[float, Child]] = []  # when each goes on
        self.count = self.kills = self.broker_kills = self.stops = 0
        self.raised: list[Exception] = []
        self.broker_began = time.monotonic()

    def start(self, kind: str) -> Child:
        self.count += 1
        places = PLACES_TO_DIE.get(kind, [])
        where = ""
        if places and self.rng.random() < 0.3:
            where = f"{self.rng.choice(places)}=kill@{self.rng.randrange(1, 60)}"
        with armed(where):
            child = Child(actor, (str(self.folder), kind, self.rng.randrange(1 << 30)))
        self.alive[self.count] = (kind, child)
        return child

    def restart_broker(self) -> None:
        self.broker_kills += 1
        lived = time.monotonic() - self.broker_began
        where = f"{self.rng.choice(BROKER_PLACES)}=kill@{self.rng.randrange(3, 40)}"
        armed = self.rng.random() < 0.5 and lived > BACK  # else nobody would ever be back
        self.broker.env = {"IPCSYNC_FAILPOINTS": where if armed else ""}
        try:
            self.broker.start()
        except AssertionError:  # it died as it started: that is what it was armed for
            self.broker.env = {}
            self.broker.start()
        self.broker_began = time.monotonic()

    def bury(self) -> None:
        """Whoever died is followed by another; what a living one raised is raised here."""
        for key, (kind, child) in list(self.alive.items()):
            if child.process.is_alive():
                continue
            del self.alive[key]
            self.kills += child.process.exitcode == -signal.SIGKILL
            self.stopped = [(when, other) for when, other in self.stopped if other is not child]
            unseen = child.end()
            if isinstance(unseen, Exception):
                unseen.add_note(f"raised by {kind!r}")
                self.raised.append(unseen)
                raise AssertionError("a process of the storm raised")
            assert not kind.startswith("steady"), f"{kind} ended"
            self.start(kind)
        if self.broker.process.poll() is not None:
            self.restart_broker()

    def strike(self) -> None:
        draw = self.rng.random()
        if draw < 0.08:
            if time.monotonic() - self.broker_began > BACK:
                self.broker.kill()
        else:
            kinds = [kind for kind in ACTORS if draw > 0.8 or not kind.startswith("steady")]
            wanted = self.rng.choice([*kinds, "record"])  # whose death most wait for
            child = self.rng.choice([child for kind, child in self.alive.values() if kind == wanted])
            if draw > 0.8:
                if all(child is not other for _, other in self.stopped):
                    self.stops += 1
                    os.kill(child.pid, signal.SIGSTOP)
                    self.stopped.append((time.monotonic() + self.rng.uniform(0.05, 0.8), child))
            else:
                os.kill(child.pid, signal.SIGKILL)
                child.process.join(30)

    def blow(self, seconds: float) -> None:
        until, next_strike = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < until:
            for when, child in list(self.stopped):
                if now >= when:
                    os.kill(child.pid, signal.SIGCONT)
                    self.stopped.remove((when, child))
            if now >= next_strike:
                self.strike()
                next_strike = now + self.rng.uniform(0.05, 0.4)
            self.bury()
            time.sleep(0.005)

    def settle(self) -> None:
        """The storm is over: everybody goes on, with a broker, and then nobody does."""
        for _, child in self.stopped:
            os.kill(child.pid, signal.SIGCONT)
        self.broker.kill()  # it may be armed
        self.broker.env = {}
        self.broker.start()
        before = Logs(self.folder).counts
        until = time.monotonic() + 90
        while time.monotonic() < until:
            self.bury()
            counts = Logs(self.folder).counts
            if all(counts[what] > before[what] + 3 for what in ("steady-block took", "steady-group took")):
                return
            time.sleep(0.05)
        raise AssertionError("after the storm nobody gets anything any more")

    def end(self) -> None:
        """Everybody is killed; what some raised before is raised here, all of it."""
        for kind, child in self.alive.values():
            error = child.end()
            if isinstance(error, Exception):
                error.add_note(f"raised by {kind!r}")
                self.raised.append(error)
        self.alive.clear()
        if self.raised:
            raise ExceptionGroup("in the storm", self.raised)


def blow(session: Session, folder: Path, broker: Broker, seed: int, seconds: float) -> Storm:
    Region.create(folder / "page", 8 * PLACES).close()
    session.create_channel("storm", shape=(64, 64), dtype="int64", depth=DEPTH, device="cpu")
    storm = Storm(folder, seed, broker)
    try:
        first = [storm.start(kind) for kind in CAST]
        for child in first:
            if child.process.is_alive() and child._connection.poll(60):
                pass
        storm.blow(seconds)
        for _ in range(60):  # a machine that has other things to do takes longer until enough has happened
            if not (missing := too_little(Logs(folder), seconds, storm.kills)):
                break
            storm.blow(1.0)
        assert not missing, f"vacuous: {missing}"
        storm.settle()
    finally:
        storm.end()
    return storm


@pytest.mark.leaves("page")
@pytest.mark.watchdog(240 + int(2 * SECONDS))
def test_storm(runtime: Path) -> None:
    broker = Broker(runtime)
    folder = runtime / "logs"
    folder.mkdir()
    try:
        with ipcsync.connect(default_timeout=30.0) as session:
            storm = blow(session, folder, broker, SEED, SECONDS)
            logs = Logs(folder)
            say(
                f"{SECONDS} s, {storm.kills} kills, {storm.stops} stops, {storm.broker_kills} broker restarts, "
                f"{sum(logs.counts.values())} lines; {dict(sorted(logs.counts.items()))}"
            )
            check(logs)
    except BaseException as error:
        for what in ("taken for dead", "hung"):
            for line in Logs(folder).all(what):
                error.add_note(f"{what}: {line[2]}")
        error.add_note(f"the last broker said:\n{broker.log()[-2000:]}")
        error.add_note(f"replay: IPCSYNC_FAULT_SEED={SEED} IPCSYNC_FAULT_SECONDS={SECONDS}")
        raise
    finally:
        status = broker.stop()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert status == 0, broker.log()
