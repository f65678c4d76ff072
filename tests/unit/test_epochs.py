"""A channel through its writers' deaths: which item came before which, and which of the dead one's stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ipcsync import ring
from ipcsync.epochs import previous, stands
from ipcsync.errors import StaleHandle
from ipcsync.ring import Control
from ipcsync.wire import ChannelSpec, FieldSpec


@pytest.fixture
def control() -> Iterator[Control]:
    path = Path(f"/dev/shm/ipcsync-t-{uuid4().hex}")
    made = ring.create(path, ChannelSpec((FieldSpec("array", (1,), "int8"),), 256, 3, 4), cell=0, incarnation=1)
    yield made
    made.region.close()
    path.unlink()


def begin(control: Control, base: int, first_bad: int) -> None:
    ring.new_epoch(control, cell=0, incarnation=1, base=base, first_bad=first_bad)


def test_with_one_writer_the_numbers_have_no_gaps(control: Control) -> None:
    assert [previous(control, 1, n) for n in (1, 2, 3)] == [0, 1, 2]
    assert stands(control, 1, 3, 1, 3)
    assert not stands(control, 1, 3, 1, 4)


def test_a_death_leaves_a_gap_that_is_known(control: Control) -> None:
    begin(control, base=6, first_bad=5)  # 5 and 6 were begun
    assert [previous(control, 2, n) for n in (7, 8)] == [4, 7]
    assert [previous(control, 1, n) for n in (4, 3)] == [3, 2]
    assert [stands(control, 2, 7, 1, n) for n in (4, 5, 6)] == [True, False, False]
    assert stands(control, 2, 7, 2, 7)


def test_writers_that_completed_nothing_are_passed_over(control: Control) -> None:
    begin(control, base=1, first_bad=1)
    begin(control, base=2, first_bad=2)
    assert previous(control, 3, 3) == 0
    begin(control, base=5, first_bad=4)  # of the third, item 3 stands
    begin(control, base=6, first_bad=6)  # of the fourth, nothing
    assert previous(control, 5, 7) == 3
    assert previous(control, 5, 8) == 7


def test_of_writers_too_long_ago_nothing_is_known(control: Control) -> None:
    for _ in range(70):
        begin(control, base=1, first_bad=1)
    with pytest.raises(StaleHandle):
        stands(control, 71, 1, 1, 1)
