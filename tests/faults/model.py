"""What a storm's logs must and must not say."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from .storm import DEPTH

Line = list[Any]


class Logs:
    """Every process's lines, by kind of process."""

    def __init__(self, folder: Path) -> None:
        self.of: dict[str, list[list[Line]]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        for path in sorted(folder.glob("*-*")):
            kind = path.name.rpartition("-")[0]
            lines = [json.loads(line) for line in path.read_bytes().splitlines()]
            self.of[kind].append(lines)
            self.counts.update(f"{kind} {line[1]}" for line in lines)

    def all(self, what: str, *kinds: str) -> list[Line]:
        """The lines of this kind, of these processes, by time."""
        found = (line for kind in kinds or self.of for lines in self.of[kind] for line in lines if line[1] == what)
        return sorted(found, key=lambda line: line[0])


def check(logs: Logs) -> None:
    """Raises what was broken."""
    hung = logs.all("hung")
    assert not hung, f"somebody was not told: {hung}"
    for kind in ("block", "steady-block", "latest"):
        for lines in logs.of[kind]:
            in_order(kind, [line[2:] for line in lines if line[1] == "took"])
    group(logs)
    confirmed(logs)
    rounds(logs)
    for lines in logs.of["look"]:
        versions = [(line[2], line[3]) for line in lines if line[1] == "saw"]
        assert versions == sorted(versions), "an array went back to an older version"
    wrote = Counter((line[2], line[3]) for line in logs.all("wrote"))
    assert all(n == 1 for n in wrote.values()), f"a version was written twice: {wrote.most_common(1)}"


def in_order(kind: str, seen: list[Line]) -> None:
    last_epoch = last = 0
    for epoch, number, skipped in seen:
        assert number > last, f"{kind}: {number} came after {last}"
        assert epoch >= last_epoch
        if epoch == last_epoch:
            assert number == last + 1 + skipped, f"{kind}: {number} came after {last} of the same writer"
            assert kind == "latest" or skipped == 0
        last_epoch, last = epoch, number


def group(logs: Logs) -> None:
    """Of what a group shares nothing is lost while it has a living member, and nothing is given twice but by a death:
    a member that is killed between its line and its release has its items given again, at most those it held."""
    members = logs.of["group"] + logs.of["steady-group"]
    shared = sorted((line[2], line[3]) for lines in members for line in lines if line[1] == "took")
    for (epoch, number), (next_epoch, next_number) in itertools.pairwise(shared[: -2 * DEPTH]):
        assert epoch != next_epoch or next_number <= number + 1, f"the group never saw {number + 1} of epoch {epoch}"
    repeated = len(shared) - len(set(shared))
    assert repeated <= 3 * len(members), f"{repeated} items of a group were repeated"


def confirmed(logs: Logs) -> None:
    """What a writer confirmed is true for good: the reader that was there all the time has it."""
    (steady,) = logs.of["steady-block"]
    joined = next(line[0] for line in steady if line[1] == "joined")
    seen = {(line[2], line[3]) for line in steady if line[1] == "took"}
    last = max(seen)
    for when, _, *item in logs.all("confirmed", "write"):
        if when > joined and tuple(item) <= last and tuple(item) >= min(seen):
            assert tuple(item) in seen, f"item {item} was confirmed, and then gone"


def rounds(logs: Logs) -> None:
    recorded: dict[int, list[int]] = defaultdict(list)
    for _, _, incarnation, number in logs.all("recorded"):
        recorded[incarnation].append(number)
    for incarnation, numbers in recorded.items():
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), f"rounds of incarnation {incarnation}: {numbers}"
    first_bad: dict[int, int] = {}
    for _, _, incarnation, number in logs.all("told", "record", "wait"):
        if number:
            first_bad[incarnation] = min(number, first_bad.get(incarnation, number))
    for _, _, incarnation, number in logs.all("passed"):
        assert number <= len(recorded[incarnation]) + 1, f"a wait for round {number} passed, which nobody recorded"
        bad = first_bad.get(incarnation, number + 1)
        assert number < bad, f"round {number} of incarnation {incarnation} passed, and from {bad} on none is true"


def too_little(logs: Logs, seconds: float, kills: int) -> str:
    """What happened too rarely for this run to prove anything; nothing if all did."""
    if kills < seconds / 2:
        return f"{kills} kills in {seconds:g} s"
    for what in (
        "write confirmed",
        "steady-block took",
        "latest took",
        "steady-group took",
        "record recorded",
        "wait passed",
        "wait told",
        "change wrote",
        "look saw",
    ):
        if logs.counts[what] < (1 if "told" in what else seconds):
            return f"{what} {logs.counts[what]} times in {seconds:g} s"
    return ""
