"""Names that appear and peers that die, heard by whoever asked: ``session.watch`` and ``session.on_peer_died``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync import Session, errors, wire
from ipcsync.announcements import Log, Named

from ..harness import TIMEOUT, Broker, Child, Peer, wait_until

Spawn = Callable[..., Child]


def created(name: str, incarnation: int, seq: int, boot: bytes = b"b") -> wire.Announcement:
    return wire.Announcement(1, boot, seq, "created", {"kind": "event", "name": name, "incarnation": incarnation})


def test_a_name_is_new_once_and_again_when_it_is_made_anew() -> None:
    log = Log("default")
    assert log.take("default", created("a", 1, 5)) == Named("event", "a")
    assert log.merge([created("a", 1, 5).body, created("b", 2, 6).body]) == [Named("event", "b")]
    assert log.take("default", created("b", 2, 6)) is None
    assert log.take("other", created("c", 3, 7)) is None
    assert log.take("default", created("a", 4, 8)) == Named("event", "a")
    assert log.gaps == 0


@pytest.mark.parametrize(("seq", "boot"), [(7, b"b"), (1, b"c"), (6, b"c")])
def test_a_gap_and_another_broker_ask_for_a_snapshot(seq: int, boot: bytes) -> None:
    log = Log("default")
    log.take("default", created("a", 1, 5))
    log.missed = False
    log.take("", wire.Announcement(1, boot, seq, "tick"))
    assert (log.missed, log.gaps) == (True, 1)


def test_a_watch_gives_what_is_there_and_what_appears(session: Session) -> None:
    session.create_event("requests.1", device="cpu")
    session.create_event("other", device="cpu")
    with session.watch("requests.*") as watch, session.watch("*") as everything:
        assert watch.get() == ("event", "requests.1")
        with pytest.raises(errors.WaitTimeout, match=r"requests\.\*"):
            watch.get(timeout=0.01)
        event = session.create_event("requests.2", device="cpu")
        assert watch.get() == ("event", "requests.2")
        session.create_channel("requests.3", shape=(1,), dtype="uint8", device="cpu")
        assert next(watch) == ("channel", "requests.3")
        session.unlink("requests.2")
        event.close()
        session.create_event("requests.2", device="cpu")
        assert next(watch) == ("event", "requests.2")
        assert {everything.get().name for _ in range(5)} == {"requests.1", "other", "requests.2", "requests.3"}
        watch.close()
        assert list(watch) == []


def test_a_watch_is_of_one_namespace(broker: Broker, session: Session) -> None:
    with ipcsync.connect(namespace="elsewhere") as other, session.watch("*") as watch:
        other.create_event("theirs", device="cpu")
        session.create_event("ours", device="cpu")
        assert watch.get().name == "ours"


def test_a_watch_outlives_its_broker(runtime: Path) -> None:
    broker = Broker(runtime)
    with ipcsync.connect() as session, ipcsync.connect() as other, session.watch("*") as watch:
        other.create_event("before", device="cpu")
        assert watch.get().name == "before"
        broker.kill()
        broker.start()
        other.create_event("after", device="cpu", timeout=TIMEOUT)
        assert watch.get().name == "after"
        wait_until(lambda: session.stats()["announcement_gaps"], "the gap")
        with pytest.raises(errors.WaitTimeout):
            watch.get(timeout=0.01)
    assert broker.stop() == 0


def test_a_closed_session_wakes_who_watches(broker: Broker) -> None:
    session = ipcsync.connect()
    watch = session.watch("*", timeout=None)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            next(watch)
        except errors.IpcSyncError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    session.close()
    thread.join(TIMEOUT)
    assert [type(error) for error in raised] == [errors.SessionClosed]
    with pytest.raises(errors.SessionClosed):
        session.watch("*")


def test_a_coroutine_watches_and_may_be_cancelled(session: Session) -> None:
    async def main() -> list[str]:
        seen = []
        with session.watch("*", timeout=None) as watch:
            waiting = asyncio.ensure_future(watch.__anext__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.to_thread(session.create_event, "a", device="cpu")
            await asyncio.to_thread(session.create_event, "b", device="cpu")
            async for named in watch:
                seen.append(named.name)
                if len(seen) == 2:
                    watch.close()
        return seen

    assert asyncio.run(asyncio.wait_for(main(), TIMEOUT)) == ["a", "b"]


def stay(peer: Peer, name: str) -> None:
    with ipcsync.connect(name=name):
        peer.send("here")
        peer.recv()


def test_a_death_is_called_and_a_good_bye_is_not(session: Session, spawn: Spawn) -> None:
    died: list[errors.PeerDied] = []
    session.on_peer_died(lambda error: 1 / 0)  # somebody's mistake harms nobody else
    end = session.on_peer_died(died.append)
    leaver, victim = spawn(stay, "leaver"), spawn(stay, "victim")
    assert [leaver.recv(), victim.recv()] == ["here", "here"]
    leaver.send()
    leaver.join()
    victim.kill()
    wait_until(lambda: died, "the call")
    assert [(error.session, error.pid) for error in died] == [("victim", victim.pid)]  # type: ignore[attr-defined]
    end()
    another = spawn(stay, "another")
    another.recv()
    heard: list[errors.PeerDied] = []
    session.on_peer_died(heard.append)
    another.kill()
    wait_until(lambda: heard, "the second call")
    assert len(died) == 1


def test_what_a_session_counts(session: Session) -> None:
    event = session.create_event("e", device="cpu")
    with pytest.raises(errors.WaitTimeout):
        event.synchronize(timeout=0.2)
    assert session.stats() == {
        "open": 1,
        "waits": 0,
        "came": 0,
        "timed_out": 1,
        "ended": 0,
        "condemned": 0,
        "announcement_gaps": 0,
    }


@pytest.mark.parametrize("pattern", ["", 3, None])
def test_a_pattern_is_a_text(session: Session, pattern: object) -> None:
    with pytest.raises(errors.InvalidArgument, match="pattern"):
        session.watch(pattern)  # type: ignore[arg-type]
