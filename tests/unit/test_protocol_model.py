"""Every interleaving of the announce-check-act protocol, on a model of x86's memory, store buffers included.

Process B waits for round 1 of e1, whose recorder died, and records round 1 of e2 behind it. A condemner ends e1. A
consumer reads e2's word and then its verdict. In no interleaving may the consumer accept e2's round when B's stream
got past its wait only because e1's word was released by force. The same explorer, given the protocol with one of its
steps left out, must find the interleaving that breaks: a check that cannot fail checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

NONE = 99  # no verdict
Memory = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class World:
    memory: Memory
    buffers: tuple[tuple[tuple[str, int], ...], ...] = ((), ())  # B's and the condemner's stores on their way
    at: tuple[int, int] = (0, 0)  # program counters of B and the condemner
    seen: tuple[int, ...] = ()  # what the condemner's scans saw: (entry, intent > word)
    queue: tuple[str, ...] = ()  # B's stream
    false: bool = False  # B's stream ran on past a forced release
    given_up: bool = False  # B raised
    accepted: int = 0  # consumer: 0 not yet, 1 word seen, 2 passed, 3 refused


def read(memory: Memory, word: str) -> int:
    return dict(memory)[word]


def put(memory: Memory, word: str, value: int) -> Memory:
    return tuple((name, value if name == word else old) for name, old in memory)


#: B's program. ("store", word, value) goes to its buffer; a load that forbids ends it; "enqueue" is the device's queue.
B = (
    ("store", "entry", 1),
    ("load", "verdict1"),
    ("enqueue", "wait"),
    ("store", "intent", 1),
    ("load", "verdict2"),
    ("load", "taint"),
    ("enqueue", "write"),
)
CONDEMNER = (
    ("store", "verdict1", 1),
    ("fence",),
    ("scan", "entry"),
    ("store-if", "taint", 1),
    ("fence",),
    ("scan", "intent"),
    ("store-if", "verdict2", 1),
    ("release",),
)


def steps(world: World, b: tuple[tuple[object, ...], ...], k: tuple[tuple[object, ...], ...]) -> Iterator[World]:
    memory = world.memory
    for who in (0, 1):  # a buffered store may land at any moment
        if world.buffers[who]:
            (word, value), *rest = world.buffers[who]
            buffers = list(world.buffers)
            buffers[who] = tuple(rest)
            yield replace(world, memory=put(memory, word, value), buffers=tuple(buffers))
    if world.at[0] < len(b) and not world.given_up:
        op = b[world.at[0]]
        next_b = replace(world, at=(world.at[0] + 1, world.at[1]))
        if op[0] == "store":
            yield replace(next_b, buffers=((*world.buffers[0], (op[1], op[2])), world.buffers[1]))
        elif op[0] == "enqueue":
            yield replace(next_b, queue=(*world.queue, op[1]))
        else:
            value = read(memory, str(op[1]))
            yield replace(next_b, given_up=value == 1)
    if world.at[1] < len(k):
        op = k[world.at[1]]
        next_k = replace(world, at=(world.at[0], world.at[1] + 1))
        if op[0] == "store" or (op[0] == "store-if" and world.seen[-1]):
            yield replace(next_k, buffers=(world.buffers[0], (*world.buffers[1], (op[1], op[2]))))
        elif op[0] == "store-if":
            yield next_k
        elif op[0] == "fence":  # membarrier: everybody's stores have landed
            for word, value in (*world.buffers[0], *world.buffers[1]):
                memory = put(memory, word, value)
            yield replace(next_k, memory=memory, buffers=((), ()))
        elif op[1:] == ("entry",):
            yield replace(next_k, seen=(*world.seen, read(memory, "entry")))
        elif op[1:] == ("intent",):
            tainted = world.seen[0]
            yield replace(next_k, seen=(*world.seen, int(tainted and read(memory, "intent") > read(memory, "word2"))))
        else:
            for word, value in world.buffers[1]:
                memory = put(memory, word, value)
            yield replace(next_k, memory=put(memory, "word1", 1), buffers=(world.buffers[0], ()))
    if world.queue:  # B's stream
        head, *rest = world.queue
        if head == "write":
            yield replace(world, memory=put(memory, "word2", 1), queue=tuple(rest))
        elif read(memory, "word1"):  # A is dead: only the forced release writes this word
            yield replace(world, queue=tuple(rest), false=True)
    if world.accepted == 0 and read(memory, "word2") == 1:
        yield replace(world, accepted=1)
    elif world.accepted == 1:
        yield replace(world, accepted=3 if read(memory, "verdict2") == 1 else 2)


def explore(b: tuple[tuple[object, ...], ...] = B, k: tuple[tuple[object, ...], ...] = CONDEMNER) -> tuple[int, bool]:
    """(worlds seen, whether in one of them the consumer accepted what was false)."""
    words = ("entry", "intent", "taint", "word1", "word2", "verdict1", "verdict2")
    start = World(tuple((word, NONE if word.startswith("verdict") else 0) for word in words))
    known, todo = {start}, [start]
    broken = False
    while todo:
        world = todo.pop()
        broken |= world.accepted == 2 and world.false
        for after in steps(world, b, k):
            if after not in known:
                known.add(after)
                todo.append(after)
    return len(known), broken


def test_no_interleaving_lets_a_false_round_pass() -> None:
    worlds, broken = explore()
    assert worlds > 150, "the model did not move"
    assert not broken


def swap(program: tuple[tuple[object, ...], ...], i: int, j: int) -> tuple[tuple[object, ...], ...]:
    changed = list(program)
    changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)


@pytest.mark.parametrize(
    ("b", "k"),
    [
        pytest.param(B, tuple(op for i, op in enumerate(CONDEMNER) if i != 1), id="no fence before the scan of waits"),
        pytest.param(
            B, tuple(op for i, op in enumerate(CONDEMNER) if i != 4), id="no fence before the scan of intents"
        ),
        pytest.param(B, (CONDEMNER[0], CONDEMNER[-1], *CONDEMNER[1:-1]), id="release before the chain is condemned"),
        pytest.param(swap(B, 0, 1), CONDEMNER, id="verdict loaded before the wait is announced"),
        pytest.param(tuple(op for op in B if op != ("load", "taint")), CONDEMNER, id="a tainted session records on"),
        pytest.param(swap(B, 3, 5), CONDEMNER, id="taint loaded before the intent is stored"),
    ],
)
def test_each_step_is_needed(b: tuple[tuple[object, ...], ...], k: tuple[tuple[object, ...], ...]) -> None:
    assert explore(b, k)[1], "the explorer cannot see this bug: it proves nothing"
