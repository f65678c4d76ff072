"""Who is out in the storm: processes that use events, a channel and an array for ever, and write down what they see.

Each writes lines of its own file (``write`` with O_APPEND: what was said before a SIGKILL stays said), which
``model.py`` holds against what is promised. What one process can see to be wrong by itself, it says by an assertion.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import ipcsync
from ipcsync.errors import (
    NameInUse,
    NotFound,
    PeerDied,
    RecorderBusy,
    ResourceLost,
    SessionClosed,
    StaleHandle,
)
from ipcsync.ledger import Cell
from ipcsync.ring import Buffer, Head, Reader
from ipcsync.shm import Region

from ..harness import Peer

DEPTH = 16  # six readers wait with two items in hand each, at most
PLACES = 4096  # words of the page in which recorders' streams say how far they are, one an incarnation
GONE = (StaleHandle, ResourceLost, SessionClosed)  # told that one was taken for dead, or could not be taken over
TIMEOUT = 60.0  # seconds that no wait may take, however busy the machine: everybody is told before


class Log:
    """What one process saw, a line each: [nanoseconds, what, ...]."""

    def __init__(self, folder: str, who: str) -> None:
        self._fd = os.open(Path(folder) / f"{who}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, *what: Any) -> None:
        os.write(self._fd, json.dumps([time.monotonic_ns(), *what]).encode() + b"\n")


def actor(peer: Peer, folder: str, kind: str, seed: int) -> None:
    """Runs one of ACTORS until somebody kills it, or it is told that it was taken for dead."""
    log = Log(folder, kind)
    session = ipcsync.connect(name=kind, default_timeout=TIMEOUT, timeout=TIMEOUT)
    peer.send("ready")
    try:
        ACTORS[kind](session, log, random.Random(seed), folder)
    except GONE as error:
        log("taken for dead", type(error).__name__)
    except TimeoutError as error:
        log("hung", f"{error}\n{state_of(session)}")
        raise


def state_of(session: ipcsync.Session) -> str:
    """What the channel's control file says, for whoever looks for a hang."""
    channel = session.open_channel("storm", timeout=1.0)
    control, words = channel.control, channel.control.words
    at = session.ledger.cell(control.event_cell)
    said = [
        f"claimed {words[Head.CLAIMED]} dropped {words[Head.DROPPED]} epoch {words[Head.EPOCH]} issued "
        f"{session.ledger.words[at + Cell.ISSUED]} verdict {session.ledger.words[at + Cell.VERDICT]}"
    ]
    for b in range(control.depth):
        said.append(f"buffer {b}: {words[control.buffers[b]]} void {words[control.buffers[b] + Buffer.VOID]}")
    for cell in range(control.max_readers):
        r = control.reader(cell)
        if words[r + Reader.STATE] != Reader.FREE:
            lines = ([words[r + o + b] for b in range(control.depth)] for o in (control.taken, control.released))
            said.append(
                f"reader {cell}: state {words[r + Reader.STATE]} block {words[r + Reader.OWNER] - 1} policy "
                f"{words[r + Reader.POLICY]} start {words[r + Reader.START]} group {words[r + Reader.GROUP]} gone "
                f"{words[r + Reader.GONE]} cursor {words[r + Reader.CURSOR]} until {words[r + Reader.UNTIL]} taken, "
                f"released {list(lines)} dying {session.ledger.dying(words[r + Reader.OWNER] - 1)}"
            )
    for group in range(control.max_readers):
        if control.members(group):
            said.append(f"group {group}: {control.members(group)} next {words[control.group(group) + 1]}")
    return "\n".join(said)


# -- the channel


def write(session: ipcsync.Session, log: Log, rng: random.Random, folder: str) -> None:
    """Now and then it throws an item away, confirms one, or detaches and comes back."""
    channel = session.open_channel("storm")
    stream = ipcsync.Stream("cpu") if rng.random() < 0.5 else None
    while True:
        writer = channel.writer(timeout=None)
        for _ in range(rng.randrange(20, 200)):
            with writer.slot(stream) as slot:
                if rng.random() < 0.1:
                    slot.array[...] = -1
                    slot.discard()
                    continue
                slot.meta["n"] = slot.number
                if stream is None:
                    slot.array[...] = slot.number
                else:
                    stream.enqueue(slot.array.__setitem__, ..., slot.number)
            if rng.random() < 0.1:
                slot.confirm()
                log("confirmed", writer.epoch, slot.number)
        writer.detach()


def read(session: ipcsync.Session, log: Log, rng: random.Random, folder: str, **options: Any) -> None:
    """Holds up to three items, and looks at each when it comes and when it goes."""
    stream = ipcsync.Stream("cpu") if rng.random() < 0.3 and "group" not in options else None

    def look(slot: Any) -> None:
        values = numpy.unique(slot.array)
        assert values.tolist() == [slot.number], f"item {slot.number} holds {values}"

    with session.open_channel("storm").reader(on_writer_death="wait", **options) as reader:
        log("joined")
        held: list[Any] = []
        while True:
            try:
                slot = reader.get(stream, timeout=None)
                slot.confirm()
            except PeerDied:
                continue  # said at a commit point: what was taken last was never finished
            look(slot)
            assert slot.meta == {"n": slot.number}
            log("took", slot.epoch, slot.number, slot.skipped)
            held.append(slot)
            if len(held) > rng.randrange(3):
                slot = held.pop(rng.randrange(len(held)))
                look(slot)  # not overwritten while it was held
                slot.release()


# -- an event, made anew whenever its recorder died


def page(folder: str) -> Region:
    return Region.open(Path(folder) / "page")


def created(make: Callable[[], Any]) -> Any:
    """What `make` makes; the name is free again a moment after the death of whoever had it."""
    until = time.monotonic() + TIMEOUT
    while True:
        try:
            return make()
        except NameInUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.001)


def record(session: ipcsync.Session, log: Log, rng: random.Random, folder: str) -> None:
    """Takes the pen in turns with others. Each round's work says on the page how far it is."""
    words = page(folder).words
    stream = ipcsync.Stream("cpu")
    while True:
        event = created(lambda: session.create_event("event", device="cpu", exist_ok=True))
        place = event.info.incarnation % PLACES
        try:
            for _ in range(rng.randrange(1, 30)):
                known, number = threading.Event(), [0]

                def work(
                    place: int = place, known: threading.Event = known, number: list[int] = number, nap: float = 0.0
                ) -> None:
                    known.wait()  # the round's number is known once it is recorded
                    time.sleep(nap)
                    if number[0]:
                        words[place] = number[0]

                stream.enqueue(work, place, known, number, rng.random() * 1e-3)
                try:
                    number[0] = event.record(stream)
                    log("recorded", event.info.incarnation, number[0])
                finally:
                    known.set()
            event.release()
        except RecorderBusy:
            time.sleep(rng.random() * 0.01)
        except PeerDied as error:
            log("told", event.info.incarnation, error.round)
        except StaleHandle:
            session.check()  # it is the event that is, or are we?
        finally:
            stream.synchronize()
            close(event)


def wait(session: ipcsync.Session, log: Log, rng: random.Random, folder: str) -> None:
    """Waits for rounds that are done, under way, or to come; by its host, or by a stream."""
    words = page(folder).words
    stream = ipcsync.Stream("cpu")
    while True:
        event = session.open_event("event")
        incarnation = event.info.incarnation
        place, seen = incarnation % PLACES, [0]
        round = 0
        try:
            while True:
                round = max(1, event.issued + rng.randrange(-1, 3))
                if rng.random() < 0.5:
                    event.synchronize(round=round)
                    seen[0] = words[place]
                else:
                    event.wait(stream, round=round)
                    stream.enqueue(lambda place=place, seen=seen: seen.__setitem__(0, words[place]))
                    stream.synchronize()
                    event.synchronize(round=round)  # a commit point: what was seen before it was provisional
                log("passed", incarnation, round)
                assert seen[0] >= round, f"a wait for round {round} passed when {seen[0]} was done"
                if rng.random() < 0.02:
                    break
        except (PeerDied, NotFound) as error:
            log("told", incarnation, getattr(error, "round", 0))
        except StaleHandle:
            session.check()
            log("told", incarnation, 0)  # not `round`, which may be by the count of the event that has the place now
        stream.synchronize()
        close(event)


def close(thing: Any) -> None:
    try:
        thing.close()
    except PeerDied:
        pass


# -- an array, made anew whenever somebody died writing it


def make_array(session: ipcsync.Session) -> Any:
    return created(
        lambda: session.create_array("array", {"a": ipcsync.Field((64, 64), "int64")}, device="cpu", exist_ok=True)
    )


def change(session: ipcsync.Session, log: Log, rng: random.Random, folder: str) -> None:
    """Writes versions, on its thread or a stream, in turns with others."""
    while True:
        array = make_array(session)
        stream = ipcsync.Stream("cpu") if rng.random() < 0.5 else None
        try:
            for _ in range(rng.randrange(1, 20)):
                with array.write(stream) as view:
                    view.meta["v"] = view.version
                    if stream is None:
                        view["a"][:32] = view.version
                        view["a"][32:] = view.version
                    else:
                        stream.enqueue(view["a"].__setitem__, ..., view.version)
                log("wrote", array.incarnation, view.version)
            array.release()
        except RecorderBusy:
            time.sleep(rng.random() * 0.01)
        except PeerDied:
            log("told", array.incarnation, 0)
        except StaleHandle:
            session.check()
        close(array)


def look(session: ipcsync.Session, log: Log, rng: random.Random, folder: str) -> None:
    while True:
        array = make_array(session)
        try:
            for _ in range(rng.randrange(1, 50)):
                with array.read() as view:
                    for _ in range(2):  # as it comes and as it goes
                        values = numpy.unique(view["a"]).tolist()
                        assert values == [view.version] == [view.meta["v"]], f"version {view.version} holds {values}"
                log("saw", array.incarnation, view.version)
        except PeerDied:
            log("told", array.incarnation, 0)
        except StaleHandle:
            session.check()
        close(array)


ACTORS: dict[str, Callable[..., None]] = {
    "write": write,
    "block": read,
    "steady-block": read,
    "latest": lambda *args: read(*args, policy="latest"),
    "group": lambda *args: read(*args, group="g"),
    "steady-group": lambda *args: read(*args, group="g"),
    "record": record,
    "wait": wait,
    "change": change,
    "look": look,
}
