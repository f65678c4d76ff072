"""A broker that is killed, and the one that takes its ledger over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipcsync import wire
from ipcsync.ledger import FOREVER, Cell, Ledger
from ipcsync_broker.journal import Journal
from ipcsync_broker.model import Session

from ..harness import Broker, wait_until
from .raw_client import Clients, Raw


@pytest.fixture
def clients(runtime: Path) -> Iterator[Clients]:
    made = Clients(runtime)
    yield made
    made.close()


@pytest.fixture
def victim(runtime: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def start(runtime: Path) -> Iterator[Callable[..., Broker]]:
    """Starts brokers, one after another; the last must leave in order."""
    made: list[Broker] = []

    def begin(failpoint: str = "") -> Broker:
        made.append(Broker(runtime, env={"IPCSYNC_FAILPOINTS": failpoint}))
        return made[-1]

    yield begin
    for broker in made[:-1]:
        broker.kill()
    assert made[-1].stop() == 0, made[-1].log()


def back(clients: Clients, before: Raw, *held: dict[str, object], **who: int) -> Raw:
    """The same session, connected to the next broker."""
    again = clients.session("again", session=before.welcome.session, held=list(held), **who)
    assert again.welcome.resumed
    assert again.welcome.boot != before.welcome.boot
    assert again.welcome.block == before.welcome.block
    return again


def test_sessions_come_back_and_rounds_go_on(start: Callable[..., Broker], clients: Clients, runtime: Path) -> None:
    broker = start()
    client = clients.session()
    event = client.call("create_event", wire.CreateEvent("e", "cpu"))
    client.call("pen", wire.Pen(event.incarnation))
    page = Ledger.open(runtime / "ledger")
    at = page.cell(event.cell)
    broker.kill()
    page.words[at + Cell.INTENT] = page.words[at + Cell.WORD] = page.words[at + Cell.ISSUED] = 9
    start()
    client = back(clients, client, {"incarnation": event.incarnation, "pen": True})
    assert page.words[at + Cell.VERDICT] == FOREVER
    assert page.boot == client.welcome.boot
    assert client.call("pen", wire.Pen(event.incarnation)) == wire.PenReply(9)
    assert client.call("open_event", wire.Open("event", "e")) == event
    assert client.call("create_event", wire.CreateEvent("f", "cpu")).incarnation == event.incarnation + 1
    assert client.call("bye", wire.Bye()) == wire.Empty()
    page.region.close()


def test_who_dies_with_the_broker_is_condemned(
    start: Callable[..., Broker], clients: Clients, runtime: Path, victim: subprocess.Popen[bytes]
) -> None:
    broker = start()
    client, dead = clients.session(), clients.session("victim", pid=victim.pid)
    event = dead.call("create_event", wire.CreateEvent("e", "cpu"))
    client.call("open_event", wire.Open("event", "e"))
    dead.call("pen", wire.Pen(event.incarnation))
    page = Ledger.open(runtime / "ledger")
    at = page.cell(event.cell)
    page.words[at + Cell.INTENT] = page.words[at + Cell.ISSUED] = 1
    broker.kill()
    victim.kill()
    victim.wait()
    start()
    client = back(clients, client, {"incarnation": event.incarnation})
    assert (page.words[at + Cell.VERDICT], page.words[at + Cell.WORD]) == (1, FOREVER)
    assert page.read_text(at + Cell.CULPRIT_NAME) == "victim"
    assert client.call("create_event", wire.CreateEvent("e", "cpu")).cell != event.cell
    client.call("bye", wire.Bye())
    page.region.close()


@pytest.mark.parametrize("place", ["condemn.verdict", "condemn.release", "journal.write"])
def test_a_condemnation_that_was_begun_is_finished(
    start: Callable[..., Broker], clients: Clients, runtime: Path, victim: subprocess.Popen[bytes], place: str
) -> None:
    nth = "@4" if place == "journal.write" else ""  # two sessions and an event are written first, then the death
    broker = start(f"{place}=kill{nth}")
    client, dead = clients.session(), clients.session("victim", pid=victim.pid)
    event = dead.call("create_event", wire.CreateEvent("e", "cpu"))
    page = Ledger.open(runtime / "ledger")
    at = page.cell(event.cell)
    victim.kill()
    victim.wait()
    assert broker.process.wait(30) == -9
    assert page.words[at + Cell.WORD] == 0, "not yet released"
    start()
    back(clients, client).call("bye", wire.Bye())
    assert page.words[at + Cell.VERDICT] == 1
    wait_until(lambda: page.words[at + Cell.WORD] == FOREVER, "the release")
    page.region.close()


def test_a_death_in_the_take_over_is_taken_over_again(
    start: Callable[..., Broker], clients: Clients, runtime: Path
) -> None:
    broker = start()
    client = clients.session()
    client.call("create_event", wire.CreateEvent("e", "cpu"))
    broker.kill()
    with pytest.raises(AssertionError, match="status -9"):
        start("broker.takeover=kill")
    start()
    client = back(clients, client, {"incarnation": 1})
    assert isinstance(client.call("open_event", wire.Open("event", "e")), wire.EventInfo)
    client.call("bye", wire.Bye())


@pytest.mark.parametrize("damage", ["missing", "garbage", "of another ledger", "a flipped bit"])
def test_without_its_journal_everything_on_the_page_is_lost_and_said_so(
    start: Callable[..., Broker], clients: Clients, runtime: Path, damage: str
) -> None:
    broker = start()
    client = clients.session()
    event = client.call("create_event", wire.CreateEvent("e", "cpu"))
    page = Ledger.open(runtime / "ledger")
    at = page.cell(event.cell)
    broker.kill()
    journal = runtime / "journal"
    if damage == "missing":
        journal.unlink()
    elif damage == "garbage":
        journal.write_bytes(b"\xff" * 1000)
    elif damage == "a flipped bit":
        whole = bytearray(journal.read_bytes())
        whole[40] ^= 4
        journal.write_bytes(whole)
    else:
        Journal(journal, 12345).close()
    start()
    assert (page.words[at + Cell.VERDICT], page.words[at + Cell.CAUSE]) == (1, Cell.RESOURCE_LOST)
    assert page.words[at + Cell.WORD] == FOREVER
    again = clients.session("again", session=client.welcome.session, held=[{"incarnation": event.incarnation}])
    assert not again.welcome.resumed
    assert isinstance(again.call("create_event", wire.CreateEvent("e", "cpu")), wire.EventInfo)
    again.call("bye", wire.Bye())
    page.region.close()


def test_an_entry_cut_short_does_not_count_and_those_before_it_do(runtime: Path) -> None:
    path = runtime / "journal"
    journal = Journal(path, 7)
    for number in range(1, 4):
        journal.append({("session", number): _session(number)})
    before = journal._end
    journal.append({("session", 2): None, ("session", 4): _session(4)})
    end = journal._end
    journal.close()
    whole = path.read_bytes()
    assert Journal.read(path, 8) is None, "another ledger's"
    entities, last = Journal.read(path, 7) or ({}, None)
    assert set(entities) == {("session", 1), ("session", 3), ("session", 4)}
    assert last is not None
    assert last.session == 4
    head = before + 8
    for cut in range(end - head):  # the head, length and checksum, is written last
        path.write_bytes(whole[:before] + bytes(8) + whole[head : end - cut])
        entities, _ = Journal.read(path, 7) or ({}, None)
        assert set(entities) == {("session", 1), ("session", 2), ("session", 3)}, "whole or not at all"
    path.unlink()


def test_a_journal_with_a_damaged_entry_is_not_believed(runtime: Path) -> None:
    """Were the entries before it believed, what the others named would be given away under whoever has it."""
    path = runtime / "journal"
    journal = Journal(path, 7)
    for number in range(1, 4):
        journal.append({("session", number): _session(number)})
    begin, end = 16, journal._end
    journal.close()
    whole = path.read_bytes()
    for at in range(begin, end):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            Journal.read(path, 7)
    path.unlink()


def test_a_full_journal_is_written_anew_and_forgets_no_number(runtime: Path) -> None:
    path = runtime / "journal"
    journal = Journal(path, 7)
    for number in range(1, 20_000):
        journal.append({("session", number): _session(number), ("session", number - 50): None})
    assert path.stat().st_size == 1 << 20
    entities, last = Journal.read(path, 7) or ({}, None)
    assert len(entities) == 50
    assert last is not None
    assert last.session == 19_999
    journal.close()
    path.unlink()


def _session(number: int) -> Session:
    return Session(number=number, block=0, name="s", namespace="default", pid=1, start=1, uid=0, pid_namespace=1)
