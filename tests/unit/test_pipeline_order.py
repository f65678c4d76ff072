"""How replicas keep the order: what is put in order, who waits for whom, and what a killed worker's counts say."""

from __future__ import annotations

import random
import threading

import pytest

from ipcsync.errors import WaitTimeout
from ipcsync_workers.counters import NOTHING, Counters
from ipcsync_workers.order import OVER, Board, Gate, Made, Order

from ..harness import TIMEOUT


def test_whatever_comes_is_put_in_order():
    order, got = Order(0), []
    items = [Made(n, n - 1) for n in range(1, 50)]
    random.Random(1).shuffle(items)
    for made in items:
        assert order.add(made, f"item {made.number}")
        while (found := order.pop()) is not None:
            got.append(found)
    assert got == [(Made(n, n - 1), f"item {n}") for n in range(1, 50)]
    assert order.early == []


def test_numbers_with_a_gap_are_passed_over_once_it_is_known():
    order = Order(3)
    assert order.add(Made(9, 4), "nine")
    assert order.pop() is None
    assert order.early == ["nine"]
    assert order.add(Made(4, 3), "four")
    assert order.next
    assert [order.pop(), order.pop(), order.pop()] == [(Made(4, 3), "four"), (Made(9, 4), "nine"), None]


def test_what_was_there_before_is_refused():
    order = Order(3)
    assert not order.add(Made(3, 2), "given out in an earlier life")
    assert order.add(Made(5, 4), "early")
    assert not order.add(Made(5, 4), "early again")
    assert order.add(Made(4, 3), "next")
    assert order.pop() == (Made(4, 3), "next")
    assert not order.add(Made(4, 3), "given out")
    assert order.pop() == (Made(5, 4), "early")


@pytest.fixture
def board():
    made = Board.create(2)
    yield made
    made.close()


def test_a_replica_waits_until_it_is_within_the_window(board):
    gate, passed = Gate(board, [0, 1], 4), threading.Event()
    gate.wait(Made(4, 3), 0.0, "")
    with pytest.raises(WaitTimeout, match="replica 2: what was made of earlier items"):
        gate.wait(Made(5, 4), 0.01, "replica 2")

    def wait() -> None:
        gate.wait(Made(5, 4), None, "")
        passed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    board[0] = 1
    with pytest.raises(WaitTimeout):
        gate.wait(Made(5, 4), 0.01, "")  # the other reader is not as far yet
    board[1] = 1
    assert passed.wait(TIMEOUT)
    thread.join()
    board[0] = board[1] = OVER  # both have left
    gate.wait(Made(10**9, 10**9 - 1), 0.0, "")


def test_the_next_item_may_be_written_however_large_its_number_is(board):
    board[0] = 7
    Gate(board, [0], 4).wait(Made(100, 7), 0.0, "")
    with pytest.raises(WaitTimeout):
        Gate(board, [0], 4).wait(Made(101, 100), 0.0, "")


def stands(*published: tuple[int, int]):
    return lambda epoch, number: (epoch, number) in published


@pytest.fixture
def port():
    made = Counters.create([], ["out"])
    yield made.outputs["out"]
    made.close()


def test_a_first_life_has_nothing_to_settle(port):
    assert port.settle(stands()) is None


def test_what_was_published_and_not_counted_is_counted(port):
    port.begin(5, 0, 1, 1, 100)
    port.count(1, 100)
    port.begin(6, 0, 1, 2, 100)  # killed here: was it published?
    assert port.settle(stands((1, 1), (1, 2))) == (6, 0)
    assert (port.items, port.bytes, port.last) == (2, 200, 2)
    assert port.settle(stands((1, 1), (1, 2))) == (6, 0)
    assert port.items == 2  # counted once


def test_what_was_begun_and_not_published_leaves_what_was_before(port):
    port.begin(5, 1, 1, 1, 100)
    port.count(1, 100)
    for epoch in (1, 2, 3):  # and killed at the same place again and again
        port.begin(6, 0, epoch, 2, 100)
        assert port.settle(stands((1, 1))) == (5, 1)
    assert (port.items, port.last) == (1, 1)


def test_that_there_is_nothing_of_an_item_is_not_counted(port):
    port.begin(5, NOTHING, 1, 1, 0)
    assert port.settle(stands((1, 1))) == (5, NOTHING)
    assert port.items == 0


class Model:
    """Replicas, their rings and the reader that puts the items in order, one step of one of them at a time."""

    def __init__(self, seed: int, board: Board, replicas: int, window: int) -> None:
        self.random, self.board = random.Random(seed), board
        self.gate, self.depth = Gate(board, [0], window), window
        numbers = sorted(self.random.sample(range(1, 120), 60))  # with gaps, as writers leave that die
        self.input = [Made(n, before) for before, n in zip([0, *numbers], numbers, strict=False)]
        self.expected = [made.number for made in self.input if made.number % 7]  # of the others there is nothing
        self.orphans: list[Made] = []
        self.held: list[Made | None] = [None] * replicas
        self.rings: list[list[Made]] = [[] for _ in range(replicas)]  # written, and not given back
        self.read = [0] * replicas
        self.order, self.got = Order(0), []
        self.kills = 8

    def step(self) -> bool:
        """One thing that can happen happens; False if nothing can."""
        moves = [(self.take, k) for k in range(len(self.held)) if self.held[k] is None and (self.orphans or self.input)]
        moves += [(self.write, k) for k in range(len(self.held)) if self.may_write(k)]
        moves += [(self.put_in_order, k) for k in range(len(self.rings)) if self.read[k] < len(self.rings[k])]
        if not moves:
            return False
        holders = [k for k, made in enumerate(self.held) if made is not None]
        slowest = min(holders, key=lambda k: self.held[k] or Made(0, 0), default=-1)  # everybody waits for this one
        others = [move for move in moves if move != (self.write, slowest)]
        if self.kills and slowest >= 0 and self.random.random() < (0.05 if others else 0.5):
            self.kill(slowest)  # when the others have written all they may, too
        else:
            move, k = self.random.choice(others if others and self.random.random() < 0.9 else moves)
            move(k)
        return True

    def take(self, k: int) -> None:
        self.held[k] = self.orphans.pop(0) if self.orphans else self.input.pop(0)

    def may_write(self, k: int) -> bool:
        made = self.held[k]
        if made is None or len(self.rings[k]) == self.depth:
            return False
        try:
            self.gate.wait(made, 0.0, "")
        except WaitTimeout:
            return False
        return True

    def write(self, k: int) -> None:
        made = self.held[k]
        assert made is not None
        self.rings[k].append(made)
        if self.kills and self.random.random() < 0.1:
            self.kill(k)  # before it could give the item back: somebody does it again
        self.held[k] = None

    def kill(self, k: int) -> None:
        made = self.held[k]
        if made is not None:
            self.kills -= 1
            self.orphans = sorted([*self.orphans, made])
            self.held[k] = None

    def put_in_order(self, k: int) -> None:
        made = self.rings[k][self.read[k]]
        if self.order.add(made, (k, made)):
            self.read[k] += 1
        else:
            self.rings[k].remove(made)
        while (found := self.order.pop()) is not None:
            (ring, made) = found[1]
            if made.number % 7:
                self.got.append(made.number)
            self.rings[ring].remove(made)
            self.read[ring] -= 1
            self.board[0] = made.number


@pytest.mark.parametrize(("replicas", "window"), [(2, 2), (3, 4), (5, 5), (4, 8)])
def test_whoever_is_killed_when_everything_arrives_once_and_nobody_waits_for_ever(replicas, window):
    for seed in range(12):
        board = Board.create(1)
        model = Model(seed, board, replicas, window)
        while model.step():
            pass
        assert model.got == model.expected
        board.close()
