"""Every bound of docs/how-to/run-a-broker.md says so before harm is done, and everything else goes on."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

import ipcsync
from ipcsync import Session, ask, errors, wire
from ipcsync import runtime as directories
from ipcsync_broker import doors
from ipcsync_broker.model import ALL_PARKED, PARKED, Quotas

from ..harness import TIMEOUT, Broker, Child, Peer, wait_until
from .pages import ROOT
from .raw_client import Clients

pytestmark = pytest.mark.fresh  # they count what their broker has, or end it


@pytest.fixture
def clients(runtime: Path) -> Iterator[Clients]:
    made = Clients(runtime)
    yield made
    made.close()


@pytest.fixture
def limited(runtime: Path) -> Iterator[Callable[..., Broker]]:
    """Starts a broker with options."""
    made: list[Broker] = []

    def start(*arguments: str) -> Broker:
        made.append(Broker(runtime, *arguments))
        return made[-1]

    yield start
    for broker in made:
        assert broker.stop() == 0, broker.log()


def counts(runtime: Path) -> dict[str, int]:
    with ask.Asker(runtime) as asker:
        found: dict[str, int] = asker.status()["counts"]
    return found


def test_the_page_names_the_bounds_that_the_code_has() -> None:
    text = (ROOT / "docs" / "how-to" / "run-a-broker.md").read_text().split("## Bounds")[1]
    quotas = Quotas()
    for number in (
        doors.QUEUE,
        doors.ANNOUNCEMENTS,
        PARKED,
        ALL_PARKED,
        quotas.sessions,
        quotas.events,
        quotas.channels,
    ):
        assert f"{number:,}" in text, number
    said = set(re.findall(r"`QuotaExceeded` \(`([a-z-]+)`\)", text))
    code = "".join(path.read_text() for path in (ROOT / "broker").rglob("*.py"))
    assert said == set(re.findall(r'resource="([a-z-]+)"', code)) | set(re.findall(r'_exceeded\("([a-z]+)"', code))


# -- quotas


def test_quotas_end_in_quota_exceeded_and_come_back(limited: Callable[..., Broker]) -> None:
    limited(
        "--max-sessions=3", "--max-events=5", "--max-channels=3", "--max-bytes=10000",
        "--max-session-events=3", "--max-session-channels=2", "--max-session-bytes=7000",
    )  # fmt: skip
    with ipcsync.connect() as one, ipcsync.connect() as two:
        refused(one, "bytes", lambda: channel(one, "big", 20_000))
        refused(one, "bytes", lambda: channel(one, "big", 8_000))
        held = [channel(one, "a", 1000), channel(one, "b", 1000)]
        refused(one, "channels", lambda: channel(one, "c", 1000))
        event = one.create_event("e", device="cpu")
        refused(one, "events", lambda: one.create_event("f", device="cpu"))
        held.append(channel(two, "c", 1000))
        refused(two, "channels", lambda: channel(two, "d", 1000))
        two.create_event("f", device="cpu")
        refused(two, "events", lambda: two.create_event("g", device="cpu"))
        with ipcsync.connect():
            with pytest.raises(errors.QuotaExceeded, match="--max-sessions") as caught:
                ipcsync.connect()
            assert caught.value.fields == {"resource": "sessions", "limit": 3}
        with ipcsync.connect():
            pass
        assert event.record() == 1, "what is there goes on"
        for each in held[:2]:
            each.close()
            one.unlink(each.name)
        for name in "xy":
            channel(one, name, 1000)


def channel(session: Session, name: str, nbytes: int) -> ipcsync.Channel:
    return session.create_channel(name, shape=(nbytes // 2,), dtype="uint8", depth=2, device="cpu", meta_bytes=0)


def refused(session: Session, resource: str, call: Callable[[], object]) -> None:
    with pytest.raises(errors.QuotaExceeded, match="--max") as caught:
        call()
    assert caught.value.fields["resource"] == resource


def test_requests_that_wait_are_bounded(broker: Broker, clients: Clients) -> None:
    waiting, other = clients.session("waiting"), clients.session("other")
    for n in range(PARKED + 5):
        waiting.send("open_event", wire.Open("event", f"e{n}"), left=None)
        if n % 100 == 0:
            other.call("beat", wire.Beat())
    failure = waiting.receive("open_event")
    assert failure.code == "quota_exceeded"
    assert failure.fields == {"resource": "calls", "limit": PARKED}
    assert other.call("status", wire.Status())["parked"] == PARKED
    made = other.call("create_event", wire.CreateEvent("e7", "cpu"))
    assert isinstance(made, wire.EventInfo)
    assert other.call("status", wire.Status())["parked"] == PARKED - 1, "one was answered"
    assert waiting.call("open_event", wire.Open("event", "e7")) == made
    for client in (waiting, other):
        client.call("bye", wire.Bye())


# -- messages and queues


def test_a_call_that_is_too_large_is_refused_before_it_is_sent(session: Session) -> None:
    fields = {f"{'x' * 100}-{n}": ipcsync.Field((1,), "uint8") for n in range(10_000)}
    with pytest.raises(errors.InvalidArgument, match="more than 1048576 bytes"):
        session.create_array("a", fields, device="cpu")
    assert session.create_event("e", device="cpu").record() == 1


def test_answers_that_nobody_reads_are_dropped_and_counted(broker: Broker, clients: Clients, session: Session) -> None:
    deaf = clients.session("deaf")
    event = session.create_event("e", device="cpu")
    for n in range(40_000):
        deaf.send("beat", wire.Beat())
        if n % 10_000 == 0:
            assert event.record()
            session.open_event("e").close()
    wait_until(lambda: counts(broker.runtime).get("unsent_answers", 0) > 1000, "answers that could not be sent")
    while deaf.socket.poll(200):
        deaf.socket.recv()
    assert deaf.call("beat", wire.Beat()) == wire.Empty(), "it is served again once it reads"
    deaf.call("bye", wire.Bye())


@pytest.mark.watchdog(180)
def test_a_subscriber_that_does_not_read_sees_a_gap_and_holds_nobody_up(broker: Broker, clients: Clients) -> None:
    client = clients.session("busy")
    with zmq.Context() as context, context.socket(zmq.SUB) as slow:
        slow.linger, slow.rcvhwm = 0, 1
        slow.subscribe(b"")
        slow.connect(directories.announce_endpoint(broker.runtime))
        assert slow.poll(30_000), "the first tick"
        for n in range(9000):  # two announcements each
            client.send("create_event", wire.CreateEvent("e", "cpu"))
            client.send("unlink", wire.Unlink("e"))
            client.send("detach", wire.Detach(n + 1))
            if n % 200 == 199:
                client.receive("detach")
        last = client.call("snapshot", wire.Snapshot()).seq
        assert last > 18_000
        seen = [wire.decode(slow.recv_multipart()[1], wire.Announcement).seq]
        while seen[-1] < last:
            assert slow.poll(30_000), "a tick"
            seen.append(wire.decode(slow.recv_multipart()[1], wire.Announcement).seq)
        assert seen == sorted(set(seen))
        assert len(seen) < seen[-1] - seen[0] + 1, "a gap"
    client.call("bye", wire.Bye())


def test_a_crowd_of_connections_is_hung_up_on_and_harms_nobody(runtime: Path) -> None:
    """libzmq aborts the process when no descriptor is left for a connection: the broker hangs up before."""
    limit = 5600
    broker = Broker(runtime, under=("prlimit", f"--nofile={limit}:{limit}"))
    crowd: list[socket.socket] = []
    try:
        with ipcsync.connect() as session:
            event = session.create_event("e", device="cpu")
            event.record()
            for name in ("broker.sock", "announce.sock"):
                crowd += connected(runtime / name, limit)
                wait_until(lambda name=name: f"{name} has" in broker.log(), "the word on it")
            wait_until(lambda: len(os.listdir(f"/proc/{broker.pid}/fd")) < limit / 2, "the end of the surplus")
            for n in range(20):
                assert event.record() == n + 2
                channel(session, f"c{n}", 100).close()
            for one in crowd:
                one.close()
            with ipcsync.connect(timeout=TIMEOUT):
                pass
            assert counts(runtime)["refused_surplus"] > limit
        clients = Clients(runtime)
        clients.listener().until("tick")
        clients.close()
        assert broker.stop() == 0, broker.log()
    finally:
        for one in crowd:
            one.close()


def connected(path: Path, count: int) -> list[socket.socket]:
    """Connections as fast as they come."""
    made: list[socket.socket] = []
    while len(made) < count:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        found = one.connect_ex(str(path))
        if found == 0:
            made.append(one)
            continue
        one.close()
        assert found == errno.EAGAIN, "those before are still to be accepted"
        time.sleep(0.001)
    return made


# -- the tmpfs

_TRY = subprocess.run(["unshare", "-m", "true"], capture_output=True) if os.path.exists("/usr/bin/unshare") else None
_FULL = """
import os, sys
from pathlib import Path
import ipcsync
from ipcsync import ask
from tests.harness import Broker, wait_until

directory = Path(os.environ["IPCSYNC_RUNTIME_DIR"])
broker = Broker(directory)
with ipcsync.connect(name="one") as one, ipcsync.connect(name="two") as two:
    small = one.create_channel("small", shape=(1 << 20,), dtype="uint8", depth=4, device="cpu")
    reader, writer = two.open_channel("small").reader(), small.writer()

    def exchange():
        for item in range(20):
            with writer.slot() as slot:
                slot.array[...] = item
            with reader.get() as slot:
                assert (slot.array == item).all()

    def refused(call):
        try:
            call()
        except ipcsync.OutOfSpace as error:
            assert error.fields["needed"] > 0, error
            return
        raise AssertionError("there was room")

    large = dict(shape=(50 << 20,), dtype="uint8", depth=2, device="cpu")
    for memory in ("broker", "session"):
        refused(lambda: one.create_channel("large", memory=memory, **large))
    refused(lambda: one.create_array("large", {"a": ipcsync.Field((100 << 20,), "uint8")}, device="cpu"))
    exchange()
    one.create_channel("large", **{**large, "shape": (5 << 20,)}).close()

    fill = os.open(directory / "fill", os.O_RDWR | os.O_CREAT, 0o600)
    size, step = 0, 32 << 20
    while step >= 4096:
        try:
            os.posix_fallocate(fill, 0, size + step)
            size += step
        except OSError:
            step //= 2
    refused(lambda: one.create_channel("tiny", **{**large, "shape": (1,)}))
    event = one.create_event("e", device="cpu")
    other = two.open_event("e")
    other.synchronize(round=event.record())
    for n in range(3500):  # the journal is full, and there is no room for another
        one.create_event(f"e{n}", device="cpu").close()
    with ask.Asker(directory) as asker:
        assert asker.status()["counts"]["journal_failures"] > 0
    exchange()
    with ipcsync.connect(name="three") as three:
        three.open_event("e").wait()
    os.ftruncate(fill, 0)
    wait_until(lambda: "there is room again" in broker.log(), "the journal's catching up")
    one.create_channel("tiny", **{**large, "shape": (1,)}).close()
    broker.kill()
    broker.start()
    exchange()
    assert two.open_event("e3499").issued == 0, "it was written down"
    two.create_event("later", device="cpu")
    writer.close(); reader.close()
assert broker.stop() == 0, broker.log()
os.unlink(directory / "fill")
print("went on")
"""


@pytest.mark.watchdog(180)
@pytest.mark.skipif(_TRY is None or _TRY.returncode != 0, reason="no mount namespace may be made here (needs root)")
def test_a_full_tmpfs_is_out_of_space_and_everything_else_goes_on(runtime: Path) -> None:
    mounted = runtime / "small"
    mounted.mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o size=64m,mode=0700 tmpfs {mounted} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", _FULL],
        env={**os.environ, "IPCSYNC_RUNTIME_DIR": str(mounted)},
        cwd=ROOT, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.stdout == "went on\n", done.stderr
    mounted.rmdir()


# -- files that somebody removes


def record_and_stay(peer: Peer) -> None:
    with ipcsync.connect(name="recorder") as session:
        event = session.create_event("e", device="cpu")
        event.record()
        peer.send("recorded")
        while peer.recv(2 * TIMEOUT) == "again":
            peer.send(event.record())


class Waiting(threading.Thread):
    """A host wait without a deadline, in a thread of its own."""

    def __init__(self, event: ipcsync.SharedEvent, round: int) -> None:
        super().__init__()
        self.event, self.round = event, round
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.event.synchronize(round=self.round, timeout=None)
        except ipcsync.IpcSyncError as error:
            self.raised = error

    def end(self) -> BaseException | None:
        self.join(TIMEOUT)
        assert not self.is_alive(), "it hangs"
        return self.raised


@pytest.mark.leaves("*")
def test_a_ledger_that_is_removed_ends_every_wait(broker: Broker, spawn: Callable[..., Child]) -> None:
    child = spawn(record_and_stay)
    assert child.recv() == "recorded"
    with ipcsync.connect() as session:
        event = session.open_event("e")
        waiting = Waiting(event, 2)
        (broker.runtime / "ledger").unlink()
        assert isinstance(waiting.end(), errors.ResourceLost)
        event.synchronize(round=1)  # it was true before
        with pytest.raises(errors.BrokerUnavailable):
            session.create_event("f", device="cpu", timeout=0.2)
        assert broker.process.wait(TIMEOUT) == 2
        assert "ledger was removed or replaced" in broker.log()
    child.send("again")
    with pytest.raises(errors.ResourceLost):
        child.recv()


@pytest.mark.leaves("*")
def test_without_its_socket_the_broker_leaves_and_waits_still_end(broker: Broker, spawn: Callable[..., Child]) -> None:
    child = spawn(record_and_stay)
    assert child.recv() == "recorded"
    with ipcsync.connect() as session:
        event = session.open_event("e")
        (broker.runtime / "broker.sock").unlink()
        assert broker.process.wait(TIMEOUT) == 2
        with pytest.raises(errors.BrokerUnavailable):
            session.create_event("f", device="cpu", timeout=0.2)
        waiting = Waiting(event, 2)
        child.send("again")
        assert child.recv() == 2
        assert waiting.end() is None, "what is attached goes on"
        waiting = Waiting(event, 3)
        child.kill()
        assert isinstance(waiting.end(), errors.PeerDied)
