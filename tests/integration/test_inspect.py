"""The operator's commands on a real broker with real processes: status, top, why, condemn, logs; and with none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import PeerDied, WaitTimeout

from ..harness import Broker, Child, Peer, wait_until

Spawn = Callable[..., Child]


def run(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    """The command as a person has it; a wide terminal."""
    command = [sys.executable, "-c", "from ipcsync.cli import main; main()", *arguments]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, input=answer, capture_output=True, text=True, env=env, timeout=40)


def ask(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.returncode in (0, 4), done.stderr
    return json.loads(done.stdout)


# -- children


def takes_and_holds(peer: Peer) -> None:
    with ipcsync.connect(name="save") as session, session.open_channel("frames").reader() as reader:
        peer.send("attached")
        slots = [reader.get() for _ in range(2)]
        peer.send("holds both")
        peer.recv()
        for slot in slots:
            slot.release()


def writes_three(peer: Peer) -> None:
    with ipcsync.connect(name="read") as session:
        channel = session.create_channel("frames", shape=(4,), dtype="uint8", depth=2, device="cpu")
        with channel.writer() as writer:
            peer.send("ready")
            peer.recv()
            for item in range(3):
                with writer.slot() as slot:
                    slot.array[...] = item


def records_after(peer: Peer, mine: str, other: str) -> None:
    """Records its event, then waits for the other's second round before it records its own second: a deadlock, if the
    other does the same."""
    with ipcsync.connect(name=f"session-of-{mine}", default_timeout=20.0) as session:
        event = session.create_event(mine, device="cpu")
        event.record()
        peer.send("recorded")
        peer.recv()
        try:
            session.open_event(other).synchronize(round=2)
        except (WaitTimeout, PeerDied) as error:
            peer.send(str(error))


def waits(peer: Peer, name: str) -> None:
    with ipcsync.connect(name="waiter") as session:
        event = session.open_event(name)
        peer.send("waits")
        try:
            event.synchronize(round=1, timeout=6.0)
        except WaitTimeout as error:
            peer.send(error.why)


# -- tests


@pytest.mark.parametrize("command", ["status", "events", "channels", "top", "why x", "condemn x --yes", "logs"])
def test_without_a_broker_each_says_so(runtime: Path, command: str) -> None:
    done = run(*command.split())
    assert done.returncode == 3
    assert "no broker" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_directory_that_cannot_be_used_is_another_matter(runtime: Path) -> None:
    done = run("status", "--runtime-dir", "/tmp")
    assert done.returncode == 2
    assert "/tmp" in done.stderr


def test_status_top_events_and_channels(session: Session) -> None:
    event = session.create_event("frame", device="cpu")
    event.record()
    channel = session.create_channel("frames", shape=(4,), dtype="uint8", depth=2, device="cpu")
    with channel.writer() as writer, session.open_channel("frames").reader() as reader:
        with writer.slot() as slot:
            slot.array[...] = 1
        seen = ask("status")
        assert [s["pid"] for s in seen["sessions"]] == [os.getpid()]
        (told,) = seen["channels"]
        assert (told["depth"], told["completed"], told["occupancy"], told["item_bytes"] > 0) == (2, 1, 0.5, True)
        assert [(r["held"], r["behind"], r["reader"]["pid"]) for r in told["readers"]] == [(0, 1, os.getpid())]
        assert ask("events")[0]["issued"] == 1
        assert ask("channels", "--namespace", "other") == []
        for command in (("status",), ("top", "--count", "2", "--interval", "0.1"), ("channels",)):
            text = run(*command).stdout
            assert "frames" in text
            assert "1/2" in text
        with reader.get():
            assert ask("channels")[0]["readers"][0]["held"] == 1


def test_why_follows_a_writer_to_the_stopped_reader_that_holds_it_up(spawn: Spawn, broker: Broker) -> None:
    read = spawn(writes_three)
    assert read.recv() == "ready"
    save = spawn(takes_and_holds)
    assert save.recv() == "attached"
    read.send()
    assert save.recv() == "holds both"
    wait_until(lambda: ask("why", "read")["links"], "the writer's wait")
    (link,) = ask("why", "frames")["links"]
    assert link["what"] == "a free buffer of channel 'frames'"
    assert link["seconds"] > 0
    save.kill(signal.SIGSTOP)
    try:
        told = run("why", "read").stdout
        assert f"'read' (pid {read.pid}) waits for a free buffer of channel 'frames'" in told
        assert f"held up by: 'save' (pid {save.pid}) is stopped" in told
    finally:
        save.kill(signal.SIGCONT)
    save.send()
    save.join()
    read.join()


def test_why_names_a_deadlock_and_so_does_the_timeout(spawn: Spawn, broker: Broker) -> None:
    a, b = spawn(records_after, "a", "b"), spawn(records_after, "b", "a")
    for child in (a, b):
        assert child.recv() == "recorded"
    for child in (a, b):
        child.send()
    wait_until(lambda: len(ask("why", "a")["links"]) == 2, "both waits")
    done = run("why", "a")
    assert done.returncode == 4
    assert (
        f"deadlock: 'session-of-a' (pid {a.pid}) waits for 'session-of-b' (pid {b.pid}) waits for"
        in done.stdout.replace(
            f"deadlock: 'session-of-b' (pid {b.pid}) waits for 'session-of-a' (pid {a.pid}) waits for",
            f"deadlock: 'session-of-a' (pid {a.pid}) waits for 'session-of-b' (pid {b.pid}) waits for",
        )
    )
    a.kill()
    assert "died" in b.recv()


def test_why_needs_no_broker(spawn: Spawn, broker: Broker, session: Session) -> None:
    event = session.create_event("frame", device="cpu", lifetime="broker")
    child = spawn(waits, "frame")
    assert child.recv() == "waits"
    broker.kill()
    wait_until(lambda: run("why", "waiter").stdout.startswith("'waiter'"), "the wait")
    said = child.recv()
    assert said.startswith(f"'waiter' (pid {child.pid}) waits for round 1 of event 'frame' to be")
    assert "nobody records event 'frame'" in said
    broker.start()
    child.join()
    event.close()


def test_condemn_asks_first_and_tells_everybody(session: Session, spawn: Spawn) -> None:
    event = session.create_event("frame", device="cpu")
    event.record()
    assert run("condemn", "frame", answer="n\n").returncode == 1
    assert event.query()
    done = run("condemn", "frame", answer="y\n")
    assert done.returncode == 0, done.stderr
    assert "event 'frame': 1 issued" in done.stdout
    with pytest.raises(PeerDied, match="an operator condemned 'frame'"):
        event.synchronize(round=2)
    assert run("condemn", "nothing", "--yes").returncode == 1


def test_logs_of_a_broker_in_the_background(runtime: Path) -> None:
    subprocess.run([sys.executable, "-m", "ipcsync_broker", "--detach", "--http", "127.0.0.1:0"], check=True)
    follow = subprocess.Popen(
        [sys.executable, "-c", "from ipcsync.cli import main; main()", "logs", "-f"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert follow.stdout is not None
        assert "page at http://127.0.0.1:" in follow.stdout.readline()
        with ipcsync.connect(name="somebody"):
            while "session 'somebody'" not in follow.stdout.readline():
                pass
    finally:
        subprocess.run([sys.executable, "-m", "ipcsync_broker", "--stop"], check=True)
    assert "stopping" in follow.communicate(timeout=20)[0]
    assert follow.returncode == 0


def test_logs_say_where_a_broker_in_the_foreground_writes(broker: Broker) -> None:
    done = run("logs")
    assert done.returncode == 1
    assert str(broker.output) in done.stderr


def opens(peer: Peer) -> None:
    with ipcsync.connect(name="edges") as session:
        peer.send("opens")
        session.open_channel("frames", timeout=30.0).close()


def test_why_knows_who_waits_for_a_name(spawn: Spawn, session: Session) -> None:
    child = spawn(opens)
    assert child.recv() == "opens"
    wait_until(lambda: run("why", "frames").returncode == 0, "the wait")
    assert f"'edges' (pid {child.pid}) waits for 'frames' to be created" in run("why", "edges").stdout
    assert "nobody has created 'frames'" in run("why", "frames").stdout
    channel = session.create_channel("frames", shape=(4,), dtype="uint8", depth=2, device="cpu")
    child.join()
    channel.close()
