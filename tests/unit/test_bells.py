"""Every interleaving of going to sleep and being woken (bells.py), on a model of x86's memory with its store buffers.

A recorder stores rounds 1 and 2 and rings after each, two sleepers wait for one of them each, and in one variant a
condemner tolls. In no interleaving may anybody be left asleep once what it waits for is there. With any one step of the
protocol left out the same explorer must find such an interleaving: a check that cannot fail checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

Op = tuple[object, ...]
Program = tuple[Op, ...]
ASLEEP, DONE = -1, -2


def record(round: int) -> Program:
    """Stores it; looks at the bell; if it is not 0, silences it and wakes everybody (a system call)."""
    return (("store", "word", round), ("skip-if-0", "bell", 2), ("store", "bell", 0), ("wake",))


def sleeper(token: int, round: int) -> Program:
    """Goes by the token that is in the bell, or makes one; fences; looks; sleeps while the bell holds that token."""
    return (("take", 1), ("make", token), ("barrier",), ("look", round), ("sleep",))


TOLL: Program = (("store", "word", 9), ("store", "bell", 0), ("wake",))
RECORDER = record(1) + record(2)


@dataclass(frozen=True)
class World:
    memory: tuple[tuple[str, int], ...]
    at: tuple[int, ...]  # of each process: its next step, or asleep, or done
    buffers: tuple[tuple[tuple[str, int], ...], ...]  # its stores on their way
    tokens: tuple[int, ...]  # what it goes by
    made: tuple[int, ...]  # how many tokens it made


def put(memory: tuple[tuple[str, int], ...], word: str, value: int) -> tuple[tuple[str, int], ...]:
    return tuple((name, value if name == word else old) for name, old in memory)


def landed(world: World, who: int) -> World:
    memory = world.memory
    for word, value in world.buffers[who]:
        memory = put(memory, word, value)
    return replace(world, memory=memory, buffers=(*world.buffers[:who], (), *world.buffers[who + 1 :]))


def changed(values: tuple[int, ...], who: int, to: int) -> tuple[int, ...]:
    return (*values[:who], to, *values[who + 1 :])


def moved(world: World, who: int, to: int) -> World:
    return replace(world, at=changed(world.at, who, to))


def stored(world: World, who: int, word: str, value: int) -> World:
    buffer = (*world.buffers[who], (word, value))
    return replace(world, buffers=(*world.buffers[:who], buffer, *world.buffers[who + 1 :]))


def seen(world: World, who: int, word: str) -> int:
    """What a process reads: its own store on its way, else the memory."""
    return next((value for name, value in reversed(world.buffers[who]) if name == word), dict(world.memory)[word])


def steps(world: World, programs: tuple[Program, ...]) -> Iterator[World]:
    for who, program in enumerate(programs):
        if world.buffers[who]:  # a buffered store may land at any moment
            (word, value), *rest = world.buffers[who]
            buffers = (*world.buffers[:who], tuple(rest), *world.buffers[who + 1 :])
            yield replace(world, memory=put(world.memory, word, value), buffers=buffers)
        at = world.at[who]
        if not 0 <= at < len(program):
            continue
        kind, *rest_of = program[at]
        on = moved(world, who, at + 1)
        if kind == "store":
            yield stored(on, who, str(rest_of[0]), int(str(rest_of[1])))
        elif kind == "take":
            token = seen(world, who, "bell")
            on = moved(world, who, at + 1 + int(str(rest_of[0]))) if token else on
            yield replace(on, tokens=changed(world.tokens, who, token))
        elif kind in ("make", "make-again"):  # never the same twice, or always
            token = int(str(rest_of[0])) + (100 * world.made[who] if kind == "make" else 0)
            on = replace(
                on, tokens=changed(world.tokens, who, token), made=changed(world.made, who, world.made[who] + 1)
            )
            yield stored(on, who, "bell", token)
        elif kind == "skip-if-0":
            yield on if seen(world, who, str(rest_of[0])) else moved(world, who, at + 1 + int(str(rest_of[1])))
        elif kind == "look":
            yield moved(world, who, DONE) if seen(world, who, "word") >= int(str(rest_of[0])) else on
        elif kind == "barrier":  # everybody's stores have landed
            for each in range(len(programs)):
                on = landed(on, each)
            yield on
        elif kind == "wake":
            on = landed(on, who)
            yield replace(on, at=tuple(0 if place == ASLEEP else place for place in on.at))
        else:  # a futex wait: the kernel compares, and sleeps, in one
            on = landed(world, who)
            holds = dict(on.memory)["bell"]
            falls = holds != 0 if rest_of else holds == world.tokens[who]
            yield moved(on, who, ASLEEP if falls else 0)


def explore(*programs: Program) -> tuple[int, bool]:
    """(worlds seen, whether in one of them nothing moves any more and somebody sleeps who need not)."""
    nobody = (0,) * len(programs)
    start = World((("word", 0), ("bell", 0)), nobody, ((),) * len(programs), nobody, nobody)
    known, todo, broken = {start}, [start], False
    wanted = [next((int(str(op[1])) for op in program if op[0] == "look"), 0) for program in programs]
    while todo:
        world = todo.pop()
        after = list(steps(world, programs))
        if not after:
            word = dict(world.memory)["word"]
            broken |= any(at == ASLEEP and word >= round for at, round in zip(world.at, wanted, strict=True))
        for each in after:
            if each not in known:
                known.add(each)
                todo.append(each)
    return len(known), broken


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
def test_nobody_sleeps_on_what_is_there(first: int, second: int) -> None:
    worlds, broken = explore(RECORDER, sleeper(7, first), sleeper(8, second))
    assert worlds > 500, "the model did not move"
    assert not broken


def test_a_condemner_wakes_everybody_whatever_the_recorder_does() -> None:
    assert not explore(record(1), TOLL, sleeper(7, 2), sleeper(8, 9))[1]


def without(program: Program, kind: str) -> Program:
    return tuple(op for op in program if op[0] != kind)


def instead(program: Program, kind: str, op: Op) -> Program:
    return tuple(op if each[0] == kind else each for each in program)


def any_token(program: Program) -> Program:
    return instead(program, "sleep", ("sleep", "any"))


def swapped(program: Program, i: int, j: int) -> Program:
    changed = list(program)
    changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)


@pytest.mark.parametrize(
    ("recorder", "sleepers"),
    [
        pytest.param(RECORDER, [without(sleeper(7, 1), "barrier")], id="no fence"),
        pytest.param(
            RECORDER,
            [sleeper(7, 2), instead(sleeper(8, 1), "take", ("take", 2))],
            id="no fence of who goes by another's token",
        ),
        pytest.param(
            RECORDER,
            [(("look", 1), *without(sleeper(7, 1), "look"))],
            id="looked before it was announced",
        ),
        pytest.param(swapped(record(1), 2, 3), [sleeper(7, 1), sleeper(8, 1)], id="silenced after the wake"),
        pytest.param(
            (("skip-if-0", "bell", 2), ("store", "bell", 0), ("wake",), ("store", "word", 1)),
            [sleeper(7, 1)],
            id="the bell looked at before the round is stored",
        ),
        pytest.param(RECORDER, [any_token(sleeper(7, 2)), any_token(sleeper(8, 2))], id="any token will do"),
        pytest.param(
            RECORDER,
            [instead(sleeper(token, 2), "make", ("make-again", token)) for token in (7, 8)],
            id="a token used twice",
        ),
    ],
)
def test_each_step_is_needed(recorder: Program, sleepers: list[Program]) -> None:
    assert explore(recorder, *sleepers)[1], "the explorer cannot see this bug: it proves nothing"
