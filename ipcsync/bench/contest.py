"""Contestants that stand ready at once and take turns, so that whatever else the machine does hits them alike."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from ..errors import BrokerUnavailable

PATIENCE = 60.0  # seconds for a contestant to get ready, or to take one turn


class Contestant:
    """One way to do something between processes. ``prepare`` runs in the parent before the children exist; it is then
    pickled into each child, and ``open`` runs in every process (`peer` is None in the parent).

    A turn is `count` times ``turn`` in the parent and ``answer`` in each child that takes part in the case.
    """

    name: ClassVar[str]
    peers = 1

    def prepare(self, context: SpawnContext, folder: Path) -> None: ...

    def open(self, peer: int | None) -> None: ...

    def turn(self, case: int, number: int) -> None:
        raise NotImplementedError

    def answer(self, peer: int, case: int, number: int) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """At the end of a turn, in every process: until all that was put on streams is done."""

    def close(self) -> None: ...

    def plays(self, case: int) -> bool:
        return True

    def takes_part(self, peer: int, case: int) -> bool:
        return True


@dataclass
class Table:
    """Figures of one kind from one run. `rows`: name -> median, p99, least and most (of the repeats' medians)."""

    key: str
    title: str
    unit: str  # "µs", "items/s", "ms", ...
    ours: str = ""  # the row that the others are compared with; "": nothing is compared
    more_is_better: bool = False
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    note: str = ""


@dataclass
class Missing:
    """What was not measured, and why."""

    what: str
    why: str


def summary(repeats: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of all repeats together, but for the least and the most: those are medians of one repeat, since where the
    scheduler has put two processes decides much, and changes only now and then."""
    together = sorted(chain.from_iterable(repeats))
    medians = [statistics.median(each) for each in repeats]
    return {
        "median": statistics.median(together),
        "p99": together[min(len(together) - 1, int(0.99 * len(together)))],
        "least": min(medians),
        "most": max(medians),
        "count": len(together),
    }


Run = Callable[[Contestant, int, range], list[float]]


class Stuck(Exception):
    """A contestant did not answer in time."""


@contextmanager
def patience(seconds: float, who: str) -> Iterator[None]:
    """Raises :class:`Stuck` in the block when it takes longer. For the main thread."""

    def bark(number: int, frame: FrameType | None) -> None:
        raise Stuck(f"{who} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _serve(contestant: Contestant, peer: int, commands: Connection) -> None:
    """A child: opens its end, then answers as often as it is told, until told 0."""
    try:
        contestant.open(peer)
        commands.send("ready")
        while True:
            case, first, count = commands.recv()
            if not count:
                break
            for number in range(first, first + count):
                contestant.answer(peer, case, number)
            contestant.settle()
            commands.send("done")
        contestant.close()
    except BaseException as error:
        commands.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


class Standing:
    """A contestant with its child processes."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        self.contestant = contestant
        self._numbers: dict[int, int] = {}
        context = get_context("spawn")
        contestant.prepare(context, folder)
        self._ends: list[Connection] = []
        self._children = []
        for peer in range(contestant.peers):
            mine, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(contestant, peer, theirs), daemon=True)
            child.start()
            theirs.close()
            self._ends.append(mine)
            self._children.append(child)

    def open(self) -> None:
        """Once all children were started: they get ready side by side."""
        self.contestant.open(None)
        for end in self._ends:
            self._heard(end, "ready")

    def _heard(self, end: Connection, wanted: str) -> None:
        if not end.poll(PATIENCE):
            raise Stuck(f"{self.contestant.name}: a child said nothing for {PATIENCE:g} s")
        try:
            said = end.recv()
        except EOFError:
            raise Stuck(f"{self.contestant.name}: a child ended without a word") from None
        if said != wanted:
            raise Stuck(f"{self.contestant.name}: {said.splitlines()[0] if said else said}")

    def play(self, case: int, count: int, run: Run | None) -> list[float]:
        """One turn: `run` in the parent, the answers in the children meanwhile; returns what `run` measured. Without
        one, the turns as quickly as they go, and the seconds until all children and streams were done."""
        first = self._numbers.get(case, 0) + 1
        self._numbers[case] = first + count - 1
        playing = [e for peer, e in enumerate(self._ends) if self.contestant.takes_part(peer, case)]
        for end in playing:
            end.send((case, first, count))
        numbers = range(first, first + count)
        start = time.perf_counter()
        if run is None:
            for number in numbers:
                self.contestant.turn(case, number)
            measured = []
        else:
            measured = run(self.contestant, case, numbers)
        self.contestant.settle()
        for end in playing:
            self._heard(end, "done")
        return measured or [time.perf_counter() - start]

    def end(self) -> None:
        try:
            for end in self._ends:
                end.send((0, 0, 0))
            for child in self._children:
                child.join(10)
            self.contestant.close()
        except (OSError, Stuck):
            pass
        finally:
            for child in self._children:
                child.kill()
                child.join()
            for end in self._ends:
                end.close()


@contextmanager
def arena(*options: str) -> Iterator[Path]:
    """A runtime directory of the benchmark's own, in ``$IPCSYNC_RUNTIME_DIR``, with a broker that serves it."""
    launch = import_module("ipcsync_broker.launch")
    resource_tracker.ensure_running()  # now: what starts in the runtime directory's environment is ended with it
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ipcsync-bench-"))
    before = os.environ.get("IPCSYNC_RUNTIME_DIR")
    os.environ["IPCSYNC_RUNTIME_DIR"] = str(folder)
    try:
        broker = launch.start(folder, linger=True, options=options)  # should we be killed it leaves too
        try:
            yield folder
        finally:
            try:
                launch.stop(folder)
            except BrokerUnavailable:
                pass  # it left with the last session
            broker.wait(10)
    finally:
        if before is None:
            del os.environ["IPCSYNC_RUNTIME_DIR"]
        else:
            os.environ["IPCSYNC_RUNTIME_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


def compete(
    contestants: Sequence[Contestant],
    repeats: int,
    cases: Sequence[tuple[int, int]],
    run: Run | None,
    missing: list[Missing],
    *,
    limit: float = PATIENCE,
) -> dict[tuple[str, int], list[list[float]]]:
    """Every contestant in turn, `repeats` times after one to warm up, for each (case, count):
    (name, case) -> what each repeat measured. Who fails is left out from then on, and said in `missing`."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    with ExitStack() as stack:
        folder = Path(os.environ["IPCSYNC_RUNTIME_DIR"])
        standing: list[Standing] = []

        def attempt(one: Contestant, what: Callable[[], Any]) -> Any:
            try:
                with patience(limit, one.name):
                    return what()
            except Exception as error:
                missing.append(Missing(one.name, f"{type(error).__name__}: {error}"))
                return None

        for one in contestants:
            made = attempt(one, lambda one=one: Standing(one, folder))  # type: ignore[misc]
            if made is not None:
                stack.callback(made.end)
                standing.append(made)
        ready: list[Standing] = []
        for each in standing:
            before = len(missing)
            attempt(each.contestant, each.open)
            if len(missing) == before:
                ready.append(each)
        for repeat in range(repeats + 1):
            for case, count in cases:
                for each in [each for each in ready if each.contestant.plays(case)]:
                    measured = attempt(each.contestant, lambda e=each, c=case, n=count: e.play(c, n, run))  # type: ignore[misc]
                    if measured is None:
                        ready.remove(each)
                    elif repeat:
                        found.setdefault((each.contestant.name, case), []).append(measured)
    return found
