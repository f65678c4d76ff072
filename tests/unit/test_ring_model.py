"""Every interleaving of the ring's announce-check-act pairs, on a model of x86's memory, store buffers included.

In each pair one side may overwrite memory that the other may use, and exactly one of them must step back. The same
explorer must find the bad interleaving when the fence, or the order of two steps, is taken away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

Op = tuple[object, ...]
#: ("store", word, value) | ("load", word) | ("fence",) | ("act", name, loaded values -> whether)
Program = tuple[Op, ...]


@dataclass(frozen=True)
class World:
    memory: tuple[tuple[str, int], ...]
    at: tuple[int, ...]
    buffers: tuple[tuple[tuple[str, int], ...], ...]
    seen: tuple[tuple[int, ...], ...]
    acts: frozenset[str] = frozenset()


def _set(items: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*items[:i], value, *items[i + 1 :])


def outcomes(*programs: Program) -> set[frozenset[str]]:
    """Which sets of acts can come about."""
    start = World((), (0,) * len(programs), ((),) * len(programs), ((),) * len(programs))
    known, todo, ends = {start}, [start], set()
    while todo:
        world = todo.pop()
        after = []
        for who, program in enumerate(programs):
            if world.buffers[who]:  # a buffered store lands
                (word, value), *rest = world.buffers[who]
                memory = tuple(sorted({**dict(world.memory), word: value}.items()))
                after.append(replace(world, memory=memory, buffers=_set(world.buffers, who, tuple(rest))))
            if world.at[who] == len(program):
                continue
            op = program[world.at[who]]
            moved = replace(world, at=_set(world.at, who, world.at[who] + 1))
            if op[0] == "store":
                buffer = (*world.buffers[who], (op[1], op[2]))
                after.append(replace(moved, buffers=_set(world.buffers, who, buffer)))
            elif op[0] == "load":
                own = [value for word, value in world.buffers[who] if word == op[1]]
                value = own[-1] if own else dict(world.memory).get(str(op[1]), 0)
                after.append(replace(moved, seen=_set(world.seen, who, (*world.seen[who], value))))
            elif op[0] == "fence":  # membarrier: everybody's stores have landed
                memory_now = dict(world.memory)
                for buffer in world.buffers:
                    memory_now.update(dict(buffer))
                empty = ((),) * len(programs)
                after.append(replace(moved, memory=tuple(sorted(memory_now.items())), buffers=empty))
            else:
                decide: Callable[..., bool] = op[2]  # type: ignore[assignment]
                acts = world.acts | {str(op[1])} if decide(*world.seen[who]) else world.acts
                after.append(replace(moved, acts=acts))
        if not after:
            ends.add(world.acts)
        for world in after:
            if world not in known:
                known.add(world)
                todo.append(world)
    return ends


def claim(item: int = 1) -> Program:
    """The writer wants the buffer of item 1."""
    return (
        ("store", "claimed", item),
        ("load", "state"),
        ("act", "overwrite", lambda state: not state),
    )


JOIN: Program = (
    ("store", "state", 1),  # the cell, active from item 1 on
    ("fence",),
    ("load", "claimed"),
    ("act", "use", lambda claimed: claimed < 1),  # item 1 is promised to the reader
)
DROP: Program = (
    ("store", "dropped", 1),
    ("fence",),
    ("load", "taken"),
    ("act", "overwrite", lambda taken: not taken),
)
TAKE_LATEST: Program = (
    ("store", "taken", 1),
    ("load", "dropped"),
    ("act", "use", lambda dropped: not dropped),
)
TAKE: Program = (
    ("store", "taken", 1),
    ("load", "state"),
    ("act", "use", lambda state: not state),
)
RETIRE: Program = (("store", "state", 1), ("fence",), ("store", "roster", 1))
PASS_RETIRED: Program = (
    ("load", "roster"),
    ("load", "taken"),
    ("act", "overwrite", lambda roster, taken: roster and not taken),
)
WRITE: Program = (
    ("store", "claimed", 1),
    ("fence",),
    ("load", "begun"),
    ("act", "overwrite", lambda begun: not begun),
)
READ: Program = (
    ("store", "begun", 1),
    ("load", "claimed"),
    ("act", "use", lambda claimed: not claimed),
)


def without(program: Program, what: str) -> Program:
    return tuple(op for op in program if op[0] != what)


def swapped(program: Program) -> Program:
    """Looks first and announces after."""
    announce, look, *rest = program
    return (look, announce, *rest)


PAIRS = {
    "a join and a claim": (JOIN, claim()),
    "a latest reader and a drop": (DROP, TAKE_LATEST),
    "a stopped reader and its buffers": (RETIRE, TAKE, PASS_RETIRED),
    "a read and a write of an array": (WRITE, READ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_overwritten_that_is_used(pair: str) -> None:
    ends = outcomes(*PAIRS[pair])
    assert {"overwrite"} in ends
    assert {"use"} in ends, "the model did not move"
    assert {"overwrite", "use"} not in ends


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param((without(JOIN, "fence"), claim()), id="a join without its fence"),
        pytest.param((JOIN, swapped(claim())), id="a claim announced after the look"),
        pytest.param((without(DROP, "fence"), TAKE_LATEST), id="a drop without its fence"),
        pytest.param((DROP, swapped(TAKE_LATEST)), id="a take announced after the look"),
        pytest.param((without(RETIRE, "fence"), TAKE, PASS_RETIRED), id="a retirement without its fence"),
        pytest.param((RETIRE, swapped(TAKE), PASS_RETIRED), id="a take announced after the state"),
        pytest.param((without(WRITE, "fence"), READ), id="a write without its fence"),
        pytest.param((WRITE, swapped(READ)), id="a read announced after the look"),
    ],
)
def test_each_step_is_needed(programs: tuple[Program, ...]) -> None:
    assert {"overwrite", "use"} in outcomes(*programs), "the explorer cannot see this bug: it proves nothing"
