"""Who waits for whom: from a picture of all waits to the one that holds everything up. Pure: no I/O, no clock.

A hang is a chain. `edges` waits for item 7 of a channel; `read`, which writes it, waits for a free buffer of another;
a third session holds all of those and is stopped. :func:`follow` walks from a wait, a session or a name along every
such link, until it finds who could go on and does not (:class:`End`), or comes back to where it was: a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .host_waits import BUDGET, COMPLETED, ISSUED, SPACE

# Beside the kinds of host waits: a stream waits for the round, the host does not; and the host waits for a name to be
# created, which only the broker knows.
DEVICE, NAME = 5, 6

ProcessState = Literal["running", "stopped", "dead", "silent", "elsewhere"]  # elsewhere: another pid namespace


@dataclass(frozen=True)
class Proc:
    """A session and the process it is in."""

    block: int
    session: int
    name: str
    pid: int
    state: ProcessState = "running"

    def __str__(self) -> str:
        return f"{self.name!r} (pid {self.pid})"


@dataclass(frozen=True)
class Wait:
    """A wait of a session. ``since`` is CLOCK_MONOTONIC nanoseconds; None for a device's, whose start nobody notes."""

    block: int
    kind: int
    cell: int
    round: int
    since: int | None = None
    name: str = ""  # of NAME: what is to be created; its `cell` is -1
    several: bool = False  # it ends with any of the session's waits that say so


@dataclass(frozen=True)
class Holder:
    """A reader of a channel or array, as far as its writer may have to wait for it."""

    block: int
    held: int  # buffers (of an array: reads) it has and has not given back
    behind: int  # published items that it has still to take


@dataclass(frozen=True)
class Thing:
    """An event, a channel or an array: one cell of the ledger."""

    cell: int
    name: str
    kind: Literal["event", "channel", "array"] = "event"
    namespace: str = ""  # where it is known (the broker knows)
    recorder: int | None = None  # block
    issued: int = 0
    completed: int = 0
    verdict: int | None = None
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Everything at one moment. ``now`` is CLOCK_MONOTONIC nanoseconds."""

    now: int
    procs: dict[int, Proc] = field(default_factory=dict)
    things: dict[int, Thing] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()

    def of(self, block: int) -> list[Wait]:
        """What this session waits for, the oldest first."""
        return sorted((w for w in self.waits if w.block == block), key=lambda w: w.since or self.now)


@dataclass(frozen=True)
class Link:
    """`waiter` waits; `blockers` are the sessions that could end it."""

    wait: Wait
    waiter: str
    what: str
    seconds: float | None
    blockers: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """Where a chain ends: who holds it up (``block``; None where nobody can be named), and how it does."""

    kind: Literal["working", "stopped", "dead", "silent", "elsewhere", "nobody", "condemned", "released"]
    text: str
    block: int | None = None


@dataclass
class Chain:
    """The links in the order they were followed, the ends, and the deadlocks: each the sessions of one cycle."""

    now: int
    links: list[Link] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    deadlocks: list[list[str]] = field(default_factory=list)


def find(picture: Picture, name: str) -> list[Proc | Thing | Wait]:
    """The sessions and things of this name, and who waits for it to be created; ``namespace/name`` names a thing of
    one namespace."""
    procs = [p for p in picture.procs.values() if p.name == name]
    things = [t for t in picture.things.values() if name in (t.name, f"{t.namespace}/{t.name}")]
    return [*procs, *things, *(w for w in picture.waits if w.name in (name, name.rpartition("/")[2]) and w.name)]


def follow(picture: Picture, *starts: Wait | Proc | Thing) -> Chain:
    """The chain from these on: from a wait, from all that a session waits for, from a thing's recorder and readers."""
    chain = Chain(picture.now)
    walk = _Walk(picture, chain)
    for start in starts:
        if isinstance(start, Wait):
            walk.wait(start, [start.block])
        elif isinstance(start, Proc):
            walk.session(start.block, [])
        else:
            for wait in (w for w in picture.waits if w.cell == start.cell):
                if wait.several:
                    walk.session(wait.block, [])  # alone it says nothing of a deadlock
                else:
                    walk.wait(wait, [wait.block])
            if start.recorder is not None:
                walk.session(start.recorder, [])
            elif start.verdict is None and not any(w.cell == start.cell for w in picture.waits):
                walk.end(_nobody(start))
    return chain


class _Walk:
    def __init__(self, picture: Picture, chain: Chain) -> None:
        self.picture, self.chain = picture, chain
        self.seen: dict[Wait, bool] = {}  # whether it is part of a deadlock
        self.ended: set[End] = set()

    def session(self, block: int, trail: list[int]) -> bool:
        """What this session waits for in turn; `trail` are the sessions that led here. Whether that is a deadlock."""
        if block in trail:
            self.deadlock(trail[trail.index(block) :])
            return True
        proc = self.picture.procs.get(block)
        if proc is None:
            self.end(End("dead", "a session that has ended", block))
            return False
        waits = self.picture.of(block)
        if proc.state in ("stopped", "dead", "silent") or not waits:
            self.end(_end(proc))
            return False
        before = len(self.chain.deadlocks)
        circles = [self.wait(wait, [*trail, block]) for wait in waits if not wait.several]
        either = [self.wait(wait, [*trail, block]) for wait in waits if wait.several]
        if not any(circles) and not all(either):  # one of the several may come, and the circle is none
            found, self.chain.deadlocks[before:] = self.chain.deadlocks[before:], []
            self.chain.deadlocks += [names for names in found if str(proc) not in names]
        return any(circles) or (bool(either) and all(either))

    def wait(self, wait: Wait, trail: list[int]) -> bool:
        if wait in self.seen:
            return self.seen[wait]
        self.seen[wait] = False
        self.seen[wait] = self._wait(wait, trail)
        return self.seen[wait]

    def _wait(self, wait: Wait, trail: list[int]) -> bool:
        if wait.kind == NAME:
            self.link(wait, f"{wait.name!r} to be created", [])
            self.end(End("nobody", f"nobody has created {wait.name!r}"))
            return False
        thing = self.picture.things.get(wait.cell) or Thing(wait.cell, f"cell {wait.cell}")
        blockers = _blockers(wait, thing)
        self.link(wait, _what(wait, thing), blockers)
        if thing.verdict is not None and thing.verdict <= wait.round and wait.kind != SPACE:
            self.end(
                End("condemned", f"{_called(thing)} is condemned from round {thing.verdict} on: the wait will raise")
            )
        elif _satisfied(wait, thing):
            self.end(End("released", f"{_called(thing)} has reached round {wait.round}: the wait is ending"))
        elif not blockers:
            self.end(_nobody(thing, wait))
        circles = [self.session(block, trail) for block in blockers]
        if wait.kind == BUDGET:  # any of these would make room
            circles += [self.wait(other, trail) for other in self.picture.of(wait.block) if other.kind == DEVICE]
        return any(circles)

    def link(self, wait: Wait, what: str, blockers: list[int]) -> None:
        proc = self.picture.procs.get(wait.block)
        waiter = str(proc) if proc else f"session of block {wait.block}"
        seconds = None if wait.since is None else (self.picture.now - wait.since) / 1e9
        self.chain.links.append(Link(wait, waiter, what, seconds, tuple(blockers)))

    def end(self, end: End) -> None:
        if end not in self.ended:
            self.ended.add(end)
            self.chain.ends.append(end)

    def deadlock(self, blocks: list[int]) -> None:
        first = blocks.index(min(blocks))
        names = [str(self.picture.procs.get(b, f"block {b}")) for b in (*blocks[first:], *blocks[:first])]
        if names not in self.chain.deadlocks:
            self.chain.deadlocks.append(names)


def _satisfied(wait: Wait, thing: Thing) -> bool:
    reached = thing.issued if wait.kind == ISSUED else thing.completed
    return wait.kind != SPACE and reached >= wait.round


def _blockers(wait: Wait, thing: Thing) -> list[int]:
    if wait.kind == SPACE:
        return [h.block for h in thing.holders]
    if _satisfied(wait, thing) or (thing.verdict is not None and thing.verdict <= wait.round):
        return []
    return [] if thing.recorder is None else [thing.recorder]


def _called(thing: Thing) -> str:
    return f"{thing.kind} {thing.name!r}"


def _what(wait: Wait, thing: Thing) -> str:
    item = {"event": "round", "channel": "item", "array": "version"}[thing.kind]
    called = f"{item} {wait.round} of {_called(thing)}"
    if wait.kind == ISSUED:
        among = ", one of several" if wait.several else ""
        return f"{called} to be {'recorded' if thing.kind == 'event' else 'published'} (so far: {thing.issued}){among}"
    if wait.kind == COMPLETED:
        return f"{called} to be complete (issued: {thing.issued}, complete: {thing.completed})"
    if wait.kind == SPACE:
        what = "a free buffer of" if thing.kind == "channel" else "the end of all reads of"
        return f"{what} {_called(thing)}"
    if wait.kind == BUDGET:
        return f"a place in its wait budget, all taken by streams that wait; the next: {called}"
    return f"{called}, on a stream (issued: {thing.issued}, complete: {thing.completed})"


def _nobody(thing: Thing, wait: Wait | None = None) -> End:
    if wait is not None and wait.kind == SPACE:
        return End("released", f"no reader holds anything of {_called(thing)}: the wait is ending")
    does = "records" if thing.kind == "event" else "writes"
    return End("nobody", f"nobody {does} {_called(thing)}: no session has its pen")


def _end(proc: Proc) -> End:
    says = {
        "running": "waits for nobody: it is at work, or in something that ipcsync does not see",
        "stopped": "is stopped (a signal or a debugger holds it)",
        "dead": "is dead: whoever waits for it is about to be told",
        "silent": "was silent for too long: its lease ran out",
        "elsewhere": "waits for nobody here; it lives in another pid namespace, so its process cannot be looked at",
    }
    kind: Any = "working" if proc.state == "running" else proc.state
    return End(kind, f"{proc} {says[proc.state]}", proc.block)


# -- for people


def sentences(chain: Chain) -> str:
    """The chain in a few lines: every link, what is at its end, and the deadlocks."""
    lines = [_line(link) for link in chain.links]
    lines += [f"{'held up by' if end.block is not None else 'and'}: {end.text}" for end in chain.ends]
    lines += [f"deadlock: {_circle(names)}" for names in chain.deadlocks]
    return "\n".join(lines)


def _line(link: Link) -> str:
    since = "" if link.seconds is None else f", for {link.seconds:.1f} s"
    return f"{link.waiter} waits for {link.what}{since}"


def _circle(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} waits for itself"
    return " waits for ".join((*names, names[0]))


def as_json(chain: Chain) -> dict[str, Any]:
    """The chain as plain data, for ``ipcsync why --json``."""

    def link(each: Link) -> dict[str, Any]:
        wait = each.wait
        more = {"cell": wait.cell, "round": wait.round, "seconds": each.seconds, "blockers": list(each.blockers)}
        return {"waiter": each.waiter, "block": wait.block, "what": each.what, **more}

    ends: Iterable[End] = chain.ends
    return {
        "links": [link(each) for each in chain.links],
        "ends": [{"kind": e.kind, "text": e.text, "block": e.block} for e in ends],
        "deadlocks": chain.deadlocks,
    }
