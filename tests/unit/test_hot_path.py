"""What a record or a wait must not cost: system calls that wake nobody, and looking through all that is pending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync import bells, linux
from ipcsync.backends.cuda_pending import Pending
from ipcsync.shm import Region
from ipcsync.waiting import Spin

from ..harness import wait_until


@pytest.fixture
def wakes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses that were woken in this process."""
    seen: list[int] = []
    really = linux.futex_wake

    def wake(address: int, count: int = 0x7FFFFFFF) -> None:
        seen.append(address)
        really(address, count)

    monkeypatch.setattr(linux, "futex_wake", wake)
    return seen


def test_a_record_wakes_only_if_somebody_sleeps(
    session: ipcsync.Session, wakes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = session.create_event("frame", device="cpu")
    event.record()
    wakes.clear()
    monkeypatch.setattr(event._timeline, "_wake", lambda: wakes.append(0))
    for _ in range(10):
        event.record()
    assert not wakes
    waiter = threading.Thread(target=lambda: event.synchronize(round=12, timeout=20.0))
    waiter.start()
    words, bell = session.ledger.words, event._timeline._bell
    monkeypatch.setattr(event._timeline, "_wake", lambda: linux.futex_wake(session.ledger.address(bell)))
    wait_until(lambda: words[bell] != 0, "the waiter's token")
    event.record()
    waiter.join(10.0)
    assert not waiter.is_alive()
    assert words[bell] == 0
    assert wakes


def test_a_token_that_was_overwritten_does_not_let_its_owner_sleep(runtime: Path) -> None:
    linux.membarrier_register()
    region = Region.create(runtime / "words", 4096)
    token = bells.announce(region, 3)
    bells.ring(region, 3)
    bells.sleep(region, 3, token, 30.0)  # the watchdog would end it
    token = bells.announce(region, 3)
    region.words[3] = token + 1  # another's
    bells.sleep(region, 3, token, 30.0)
    region.close()
    (runtime / "words").unlink()


def test_a_process_spins_longer_where_sleeps_are_short() -> None:
    spin = Spin()
    for _ in range(10):
        spin.slept(20_000)
    assert spin.yields == Spin.MOST
    for _ in range(10):
        spin.slept(5_000_000)
    assert spin.yields == Spin.LEAST


def test_a_process_does_not_spin_where_that_costs_it_the_core() -> None:
    spin = Spin()
    assert spin.begin() == Spin.LEAST
    spin.spun(2_000_000)
    assert [spin.begin() for _ in range(Spin.REST)] == [0] * Spin.REST
    assert spin.begin() == Spin.LEAST, "it is tried again"
    spin.spun(2_000_000)
    assert [spin.begin() for _ in range(2 * Spin.REST)] == [0] * 2 * Spin.REST, "later each time"
    assert spin.begin() == Spin.LEAST


def test_what_is_pending_is_not_gone_through_for_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Pending(lambda _: True)
    looks = 0
    none: Callable[[], bool] = pending.none

    def counted() -> bool:
        nonlocal looks
        looks += len(pending._waits)
        return none()

    monkeypatch.setattr(pending, "none", counted)
    words = memoryview(bytearray(8)).cast("Q")
    for _ in range(5000):
        pending.add(words, 0, 1)
    assert looks < 4 * 5000
    assert not pending.none()
    words[0] = 1
    assert pending.none()
