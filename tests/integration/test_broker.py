"""A real broker process, spoken to by the protocol alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcsync import errors, ledger, wire
from ipcsync.ledger import FOREVER, Block, Cell, Ledger
from ipcsync.runtime import Lock, broker_pid

from ..harness import Broker, wait_until
from .raw_client import Clients, Raw

COMMAND = [sys.executable, "-m", "ipcsync_broker"]


@pytest.fixture
def clients(runtime: Path) -> Iterator[Clients]:
    made = Clients(runtime)
    yield made
    made.close()


@pytest.fixture
def client(broker: Broker, clients: Clients) -> Iterator[Raw]:
    made = clients.session()
    yield made
    if broker.process.poll() is None:
        made.call("bye", wire.Bye())


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "IPCSYNC_RUNTIME_DIR": str(directory)}
    return subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=50, check=False)


class Sleepers:
    """Processes that can be stopped and killed, for sessions that are not the test's own."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        self._all.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return self._all[-1]

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture
def sleepers(runtime: Path) -> Iterator[Sleepers]:
    made = Sleepers()
    yield made
    made.end()


# -- one broker a directory


def test_a_second_broker_says_who_runs_and_the_first_goes_on(broker: Broker, client: Raw) -> None:
    second = run(directory=broker.runtime)
    assert second.returncode == 3
    assert str(broker.pid) in second.stderr
    assert client.call("beat", wire.Beat()) == wire.Empty()


def test_detach_and_stop(runtime: Path) -> None:
    started = run("--detach", directory=runtime)
    assert started.returncode == 0, started.stderr
    again = run("--detach", directory=runtime)
    assert again.returncode == 3
    pid = int(started.stdout.split("pid ")[1].split(")")[0])
    assert os.getsid(pid) == pid, "it is a session leader of its own"
    stopped = run("--stop", directory=runtime)
    assert (stopped.returncode, str(pid) in stopped.stdout) == (0, True)
    assert run("--stop", directory=runtime).returncode == 3
    assert not list(runtime.iterdir()), "nothing is left"


def test_a_lingering_broker_leaves_with_its_last_session(runtime: Path, clients: Clients) -> None:
    broker = Broker(runtime, "--linger")
    client = clients.session()
    client.call("bye", wire.Bye())
    assert broker.process.wait(30) == 0


def test_it_says_where_it_serves(broker: Broker, runtime: Path) -> None:
    """Whoever starts it in a terminal sees that it is there."""
    wait_until(lambda: f"serving {runtime}" in broker.log(), "the line")


def test_sigterm_tells_everybody_and_leaves_in_order(broker: Broker, clients: Clients) -> None:
    listener, client = clients.listener(), clients.session()
    listener.until("tick")
    client.send("open_event", wire.Open("event", "never"))
    wait_until(lambda: parked(clients), "the parked open")
    broker.process.terminate()
    assert listener.until("stopping")
    assert client.receive("open_event").code == "broker_unavailable"
    assert broker.process.wait(10) == 0


def parked(clients: Clients) -> bool:
    return bool(clients.raw().call("status", wire.Status())["parked"] == 1)


def test_sd_notify_comes_when_it_can_be_reached(runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind("\0" + runtime.name)
        notify.settimeout(30)
        broker = Broker(runtime, env={"NOTIFY_SOCKET": "@" + runtime.name})
        assert notify.recv(100) == b"READY=1"
        assert (runtime / "broker.sock").is_socket()
        assert broker.stop() == 0
        assert notify.recv(100) == b"STOPPING=1"


# -- directories that cannot be used


def test_bad_directories_are_refused_before_anything_is_made(runtime: Path, tmp_path: Path) -> None:
    link, long, shared = runtime / "link", runtime / ("x" * 100), runtime / "shared"
    link.symlink_to(runtime)
    shared.mkdir()
    shared.chmod(0o755)
    for directory, says in (
        (link, "symbolic link"),
        (long, "107"),
        (shared, "0755"),
        (Path("/proc/ipcsync"), "tmpfs"),
        (runtime / "no" / "where", "no directory"),
    ):
        for arguments in ([], ["--detach"]):
            tried = run(*arguments, directory=directory)
            assert tried.returncode == 2, tried.stderr
            assert says in tried.stderr
            assert len(tried.stderr.splitlines()) == 1, "one sentence, no traceback"
    link.unlink()
    assert list(runtime.iterdir()) == [shared]
    assert not list(shared.iterdir())
    shared.rmdir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else's")
def test_somebody_elses_directory_is_refused(runtime: Path) -> None:
    other = runtime / "other"
    other.mkdir(mode=0o700)
    os.chown(other, 65534, 65534)
    tried = run(directory=other)
    assert tried.returncode == 2
    assert "65534" in tried.stderr
    other.rmdir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_uid_is_refused_even_where_the_modes_let_it_in(broker: Broker, client: Raw) -> None:
    broker.runtime.chmod(0o711)
    (broker.runtime / "broker.sock").chmod(0o666)
    child = subprocess.run(
        [sys.executable, "-c", _KNOCK, str(broker.runtime)], capture_output=True, text=True, timeout=50, check=False
    )
    broker.runtime.chmod(0o700)
    assert child.stdout.strip() == "refused", child.stderr
    assert client.call("beat", wire.Beat()) == wire.Empty()


_KNOCK = """
import os, sys, zmq
from pathlib import Path
os.environ["IPCSYNC_RUNTIME_DIR"] = sys.argv[1]
from tests.integration.raw_client import hello
from ipcsync import runtime, wire
import msgspec
frame = wire.encode(wire.Request(1, 1, "hello", msgspec.to_builtins(hello(uid=0)), 5.0))
endpoint = runtime.broker_endpoint(Path(sys.argv[1]))
os.setuid(65534)
with zmq.Context() as c, c.socket(zmq.DEALER) as s:
    s.linger = 0
    s.connect(endpoint)
    s.send(frame)
    print("answered" if s.poll(1500) else "refused")
"""


def test_modes(broker: Broker) -> None:
    for path in broker.runtime.iterdir():
        assert path.lstat().st_mode & 0o077 == 0, path


# -- sweeping


def test_start_sweeps_what_the_dead_left_and_nothing_else(runtime: Path) -> None:
    for name in ("ctl-7", "mem-7", "smem-3-1", "ledger", "notes.txt"):
        (runtime / name).write_bytes(b"x")
    broker = Broker(runtime)
    left = {p.name for p in runtime.iterdir()}
    assert not left & {"ctl-7", "mem-7", "smem-3-1"}
    assert "notes.txt" in left
    assert broker.stop() == 0
    (runtime / "notes.txt").unlink()


# -- deaths


def test_a_killed_recorder_is_condemned_with_its_chain(
    broker: Broker, client: Raw, clients: Clients, sleepers: Sleepers
) -> None:
    victim = sleepers.start()
    dead = clients.session("victim", pid=victim.pid)
    first = dead.call("create_event", wire.CreateEvent("first", "cpu"))
    client.call("open_event", wire.Open("event", "first"))
    second = client.call("create_event", wire.CreateEvent("second", "cpu"))
    dead.call("pen", wire.Pen(first.incarnation))
    client.call("pen", wire.Pen(second.incarnation))
    page = Ledger.open(broker.runtime / "ledger")
    one, two = page.cell(first.cell), page.cell(second.cell)
    page.words[one + Cell.INTENT] = page.words[one + Cell.ISSUED] = 3
    page.words[one + Cell.WORD] = 1
    mine = page.block(client.welcome.block)
    page.words[mine + Block.WAITS] = ledger.pack_wait(first.cell, 2)
    page.words[two + Cell.INTENT] = page.words[two + Cell.ISSUED] = 1
    victim.kill()
    wait_until(lambda: page.words[one + Cell.WORD] == FOREVER, "the release")
    assert page.words[one + Cell.VERDICT] == 2
    assert page.words[two + Cell.VERDICT] == 1, "the chain"
    assert page.words[two + Cell.WORD] == 0, "a living recorder's word is not touched"
    assert page.words[mine + Block.TAINT] == 1
    assert page.read_text(one + Cell.CULPRIT_NAME) == "victim"
    page.words[mine + Block.WAITS] = 0
    made = client.call("create_event", wire.CreateEvent("first", "cpu"))
    assert made.cell != first.cell
    assert page.words[one + Cell.INCARNATION] != first.incarnation, "old handles are stale"
    page.region.close()


def test_a_stopped_process_loses_its_lease_and_nothing_of_it_is_freed(
    broker: Broker, client: Raw, clients: Clients, sleepers: Sleepers
) -> None:
    victim = sleepers.start()
    dead = clients.session("victim", pid=victim.pid)
    event = dead.call("create_event", wire.CreateEvent("e", "cpu"))
    dead.call("pen", wire.Pen(event.incarnation))
    page = Ledger.open(broker.runtime / "ledger")
    at = page.cell(event.cell)
    victim.send_signal(signal.SIGSTOP)
    wait_until(lambda: page.words[at + Cell.VERDICT] == 1, "the verdict")
    assert page.words[at + Cell.CAUSE] == Cell.SILENT
    assert page.words[page.block(dead.welcome.block) + Block.LEASE] == 1
    assert dead.call("beat", wire.Beat()).code == "session_closed"
    assert page.words[at + Cell.STATE] == Cell.RETIRED
    victim.kill()
    wait_until(lambda: page.words[at + Cell.STATE] == Cell.FREE, "the end of its cells")
    page.region.close()


def test_connecting_and_dying_leaves_nothing_behind(
    broker: Broker, client: Raw, clients: Clients, sleepers: Sleepers
) -> None:
    """Descriptors, memory files and table entries of the broker are back where they were."""
    spec = wire.ChannelSpec(fields=(wire.FieldSpec("array", (64,), "uint8"),), stride=256, depth=2)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{broker.pid}/fd"))

    before: list[int] = []
    for round in range(40):
        if round == 2:  # the first brought what is loaded once
            wait_until(lambda: client.call("status", wire.Status())["sessions_total"] == 1, "the dead to be gone")
            before.append(descriptors())
        victim = sleepers.start()
        dead = clients.session(f"v{round}", pid=victim.pid)
        info = dead.call("create_channel", wire.CreateChannel("c", "cpu", spec))
        assert isinstance(info, wire.ChannelInfo), info
        dead.call("join_reader", wire.JoinReader(info.event.incarnation))
        victim.kill()
        victim.wait()
        dead.close()
        wait_until(lambda: client.call("status", wire.Status())["things_total"] == 0, "the channel to go")
    wait_until(lambda: client.call("status", wire.Status())["sessions_total"] == 1, "the dead to be gone")
    wait_until(lambda: descriptors() <= before[0], "the descriptors to be back")
    assert client.call("status", wire.Status())["cells_in_use"] == 0
    assert not [p.name for p in broker.runtime.iterdir() if p.name.startswith(("ctl", "mem"))]


# -- memory


def test_what_does_not_fit_is_out_of_space_and_everything_goes_on(broker: Broker, client: Raw) -> None:
    spec = wire.ChannelSpec(fields=(wire.FieldSpec("array", (1,), "uint8"),), stride=1 << 47, depth=2)
    refused = client.call("create_channel", wire.CreateChannel("c", "cpu", spec))
    assert refused.code == "out_of_space"
    assert not list(broker.runtime.glob("mem-*"))
    assert isinstance(client.call("create_event", wire.CreateEvent("c", "cpu")), wire.EventInfo)


# -- the loop


def test_no_message_waits_for_the_next_one(broker: Broker, client: Raw, clients: Clients) -> None:
    """The loop sleeps until its socket stirs, and sending may eat that edge: answers go out on the clock while requests
    come in. One that was overlooked would be read when the next came, and here none comes."""
    other = clients.session("other")
    for _ in range(4):
        answers = 400
        for n in range(answers):
            other.send("open_event", wire.Open("event", "never"), left=0.05 + n / 1000)
        while answers:
            assert client.call("beat", wire.Beat()) == wire.Empty()
            while other.socket.poll(0):
                other.socket.recv()
                answers -= 1
    other.call("bye", wire.Bye())


# -- announcements


def test_a_snapshot_and_the_announcements_after_it_are_everything(
    broker: Broker, client: Raw, clients: Clients, sleepers: Sleepers
) -> None:
    client.call("create_event", wire.CreateEvent("before", "cpu"))
    listener = clients.listener()
    first = listener.until("tick")[-1]
    page = client.call("snapshot", wire.Snapshot())
    assert [body["name"] for body in page.created] == ["before"]
    made = client.call("create_event", wire.CreateEvent("after", "cpu"))
    later = listener.until("created")
    assert [a.seq for a in later] == list(range(first.seq + 1, later[-1].seq + 1))
    assert wire.convert(later[-1].body, wire.EventInfo) == made
    assert later[-1].boot == client.welcome.boot == Ledger.open(broker.runtime / "ledger").boot


def test_the_lock_is_not_lost_by_looking_at_it(runtime: Path) -> None:
    lock = locked(runtime)
    assert broker_pid(runtime) == os.getpid()
    child = run(directory=runtime)
    assert child.returncode == 3
    assert str(os.getpid()) in child.stderr
    with pytest.raises(errors.BrokerRunning):
        locked(runtime)
    lock.release(unlink=True)
    assert broker_pid(runtime) is None


def locked(directory: Path) -> Lock:
    lock = Lock(directory)
    lock.acquire()
    return lock


def test_a_lock_file_that_was_replaced_is_not_held(runtime: Path) -> None:
    lock = locked(runtime)
    (runtime / "broker.lock").unlink()
    assert not lock.held()
    lock.release()


@pytest.mark.parametrize("name", ["ledger", "broker.sock", "broker.lock"])
@pytest.mark.leaves("*")
def test_a_file_that_is_removed_is_noticed_and_said(broker: Broker, clients: Clients, name: str) -> None:
    client = clients.session()
    event = client.call("create_event", wire.CreateEvent("e", "cpu"))
    page = Ledger.open(broker.runtime / "ledger")
    at = page.cell(event.cell)
    (broker.runtime / name).unlink()
    assert broker.process.wait(30) == 2
    assert name.removeprefix("broker.") in broker.log()
    lost = name == "ledger"
    assert (page.words[at + Cell.VERDICT] == 1) == lost, "who waits on a page that nobody serves is told"
    if lost:
        assert page.words[at + Cell.CAUSE] == Cell.RESOURCE_LOST
    page.region.close()
    broker.start()  # ... and the next one serves
    if not lost:
        again = clients.session(session=client.welcome.session, held=[{"incarnation": event.incarnation}])
        assert again.welcome.resumed
        again.call("bye", wire.Bye())
