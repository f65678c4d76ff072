"""A runtime directory that lets another uid in (--allow-uid), with an owner, a guest and a stranger, none of them root:
what the kernel lets each do is the point. The test itself, as root, only starts them and looks on."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import ask, config, errors, guests
from ipcsync import runtime as directories

from ..harness import Child, Peer, wait_until
from .raw_client import hello

OWNER, GUEST, STRANGER = 65533, 65534, 65532
Spawn = Callable[..., Child]
pytestmark = [
    pytest.mark.fresh,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become other uids"),
]


#: What is needed only in the course of things, from where another uid may not be able to read it.
_MODULES = (
    "encodings.idna", "fnmatch", "msgspec.json", "numpy", "platformdirs", "tomllib", "zmq.utils.monitor",
    "ipcsync.backends.host", "ipcsync_broker.launch", "tests.integration.raw_client",
    *(module.name for module in pkgutil.iter_modules(ipcsync.__path__, "ipcsync.") if module.name != "ipcsync.torch"),
)  # fmt: skip


def become(uid: int) -> None:
    """From here on we are `uid`, and have nothing of root's."""
    for name in _MODULES:
        importlib.import_module(name)
    config.load()
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0o077)
    os.environ["HOME"] = "/nonexistent"


def serve(peer: Peer, allowed: tuple[int, ...]) -> list[str]:
    """A broker of OWNER's, until SIGTERM; its warnings."""
    become(OWNER)
    from ipcsync_broker import launch

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ipcsync.broker").addHandler(handler)
    launch.serve(allow_uids=frozenset(allowed), ready=lambda: peer.send("ready"))
    return said


@pytest.fixture
def place(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory, as OWNER's; whoever comes trusts OWNER."""
    os.chown(runtime, OWNER, OWNER)
    monkeypatch.setenv("IPCSYNC_RUNTIME_OWNER", str(OWNER))
    monkeypatch.setenv("IPCSYNC_CONFIG", os.devnull)
    return runtime


@pytest.fixture
def broker(place: Path, spawn: Spawn) -> Iterator[Child]:
    """OWNER's broker, which lets GUEST in."""
    made = spawn(serve, (GUEST,))
    assert made.recv() == "ready"
    yield made
    if not made._over:
        stop(made)


def stop(broker: Child) -> list[str]:
    broker.kill(signal.SIGTERM)
    said: list[str] = broker.join()
    return said


def tried(peer: Peer, uid: int, **options: Any) -> str:
    """What a connect of this uid comes to."""
    become(uid)
    try:
        with ipcsync.connect(timeout=2.0, **options) as session:
            return f"uid {uid} is session {session.number}"
    except ipcsync.IpcSyncError as error:
        return f"{error.code}: {error}"


def asked(peer: Peer) -> dict[str, Any]:
    """The broker's status, as OWNER gets it."""
    become(OWNER)
    with ask.Asker(Path(os.environ["IPCSYNC_RUNTIME_DIR"])) as asker:
        found: dict[str, Any] = asker.status()
        return found


# -- who is let in


def exchange(peer: Peer, uid: int, mine: str, theirs: str, memory: Any) -> list[int]:
    """Writes a channel and an event of one's own, and reads the other's."""
    become(uid)
    with ipcsync.connect(name=mine) as session:
        event = session.create_event(mine, device="cpu")
        channel = session.create_channel(f"{mine}s", shape=(4,), dtype="int64", depth=2, device="cpu", memory=memory)
        made = ipcsync.Event("cpu", interprocess=True)
        made.record()
        peer.send(made.ipc_handle())
        other = ipcsync.Event.from_ipc_handle("cpu", peer.recv())
        other.synchronize()
        other.record()
        with session.open_channel(f"{theirs}s").reader() as reader, channel.writer() as writer:
            peer.send("reads")
            peer.recv()
            numbers = []
            for number in range(10):
                with writer.slot() as slot:
                    slot.array[...] = number
                got = reader.get()
                with got:
                    numbers.append(int(got.array[3]))
            event.record()
            session.open_event(theirs).synchronize(round=1)
            peer.send("done")
            peer.recv()
        return numbers


@pytest.mark.parametrize("memory", ["broker", "session"])
def test_a_guest_does_all_that_the_owner_does(broker: Child, place: Path, spawn: Spawn, memory: str) -> None:
    """Either creates what the other opens, in the broker's memory and in its own, and events that need no broker."""
    both = spawn(exchange, OWNER, "first", "second", memory), spawn(exchange, GUEST, "second", "first", memory)
    handles = [child.recv() for child in both]
    for child, handle in zip(both, reversed(handles), strict=True):
        child.send(handle)
    for child in both:
        assert child.recv() == "reads"
    owners = {path.stat().st_uid for path in place.glob("*mem-*")}
    assert owners == ({OWNER, GUEST} if memory == "session" else {OWNER})
    for child in both:
        child.send()
    for child in both:
        assert child.recv() == "done"
    for child in both:
        child.send()
    assert [child.join() for child in both] == [list(range(10))] * 2
    assert {stat.S_IMODE(path.stat().st_mode) & 0o007 for path in place.rglob("*")} == {0}
    assert stop(broker) == [], "nothing was refused"


def record_and_hang(peer: Peer, uid: int) -> None:
    become(uid)
    session = ipcsync.connect(name="victim")
    event = session.create_event("e", device="cpu")
    event.record()
    peer.send("recorded")
    signal.pause()


def wait_for_the_second(peer: Peer, uid: int) -> tuple[str, int]:
    become(uid)
    with ipcsync.connect(name="waiter") as session:
        event = session.open_event("e")
        event.synchronize(round=1)
        peer.send("waits")
        with pytest.raises(errors.PeerDied) as caught:
            event.synchronize(round=2, timeout=30.0)
        return caught.value.fields["session"], caught.value.fields["pid"]


@pytest.mark.parametrize(("dies", "waits"), [(GUEST, OWNER), (OWNER, GUEST)], ids=["guest", "owner"])
@pytest.mark.parametrize("served", [True, False], ids=["broker", "no broker"])
def test_a_death_is_seen_across_uids(
    broker: Child, place: Path, spawn: Spawn, dies: int, waits: int, served: bool
) -> None:
    """By the broker; and where it is gone, and its lock with it, by the waiter, in its stead."""
    victim = spawn(record_and_hang, dies)
    victim.recv()
    waiter = spawn(wait_for_the_second, waits)
    assert waiter.recv() == "waits"
    if not served:
        broker.kill()
        (place / directories.LOCK).unlink()
    victim.kill()
    assert waiter.join() == ("victim", victim.pid)
    if not served:
        assert (place / directories.LOCK).stat().st_uid == waits
        broker = spawn(serve, (GUEST,))
        assert broker.recv() == "ready", "a lock that a guest made is as good"
    wait_until(lambda: spawn(asked).join()["counts"].get("deaths", 0) or not served, "the count of deaths")
    assert spawn(tried, waits).join().startswith(f"uid {waits} is session")
    stop(broker)
    assert not list(place.glob("ctl-*")), "nothing of it stays"


# -- who is not


def knock(peer: Peer, uid: int) -> int:
    """Speaks to the socket itself, again and again. How often it was answered."""
    become(uid)
    import msgspec
    import zmq

    from ipcsync import wire

    frame = wire.encode(wire.Request(1, 1, "hello", msgspec.to_builtins(hello(uid=OWNER)), 5.0))
    answered = 0
    with zmq.Context() as context:
        for _ in range(20):  # it would try again by itself; so it does at once
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.connect(directories.broker_endpoint(directories.default_directory()))
                dealer.send(frame)
                answered += bool(dealer.poll(50))
    return answered


@pytest.mark.parametrize("opened", [False, True], ids=["by the list", "by its credentials"])
def test_a_third_uid_gets_nowhere(broker: Child, place: Path, spawn: Spawn, opened: bool) -> None:
    said = spawn(tried, STRANGER).join()
    assert said.startswith("permission_denied: ")
    assert f"--allow-uid {STRANGER}" in said
    if opened:
        place.chmod(0o771)
        (place / directories.SOCKET).chmod(0o666)
    try:
        assert spawn(knock, STRANGER).join() == 0
    finally:
        place.chmod(0o770)
    if opened:
        wait_until(lambda: spawn(asked).join()["counts"].get("refused_uids", 0) >= 20, "the count of refusals")
    else:
        assert "refused_uids" not in spawn(asked).join()["counts"], "it did not come so far"
    assert spawn(tried, GUEST).join().startswith(f"uid {GUEST} is session")
    assert stop(broker) == (["connections of another uid are refused"] if opened else [])


def test_nobody_is_let_in_by_a_broker_that_is_not_told_to(broker: Child, place: Path, spawn: Spawn) -> None:
    assert stat.S_IMODE(place.stat().st_mode) == 0o770
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o660}
    broker.kill()  # so that its files are still there
    next_one = spawn(serve, ())
    assert next_one.recv() == "ready"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}
    assert not [name for path in (place, *place.iterdir()) for name in os.listxattr(path) if "acl" in name]
    said = spawn(tried, GUEST).join()
    assert said.startswith("permission_denied: ")
    stop(next_one)
    (place / "life-planted").touch()
    os.chown(place / "life-planted", GUEST, GUEST)
    with pytest.raises(errors.PermissionDenied, match=f"belongs to uid {GUEST}"):
        spawn(serve, ()).recv()
    (place / "life-planted").unlink()


def use_layer_1(peer: Peer, uid: int) -> None:
    become(uid)
    ipcsync.Event("cpu", interprocess=True).ipc_handle()


def test_who_is_let_in_no_more_is_shut_out_though_what_it_left_is_in_the_way(
    broker: Child, place: Path, spawn: Spawn
) -> None:
    spawn(use_layer_1, GUEST).join()
    assert stop(broker) == []
    (theirs,) = place.iterdir()
    assert theirs.stat().st_uid == GUEST
    with pytest.raises(errors.PermissionDenied, match="see what it is, and remove it"):
        spawn(serve, ()).recv()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert guests.listed(place) == frozenset()
    shutil.rmtree(theirs)
    next_one = spawn(serve, ())
    assert next_one.recv() == "ready"
    assert stop(next_one) == []


def test_who_was_let_in_later_reaches_what_was_there(broker: Child, place: Path, spawn: Spawn) -> None:
    """A broker started anew with another list takes the page over for those on it."""
    victim = spawn(record_and_hang, OWNER)
    victim.recv()
    broker.kill()
    next_one = spawn(serve, (GUEST, STRANGER))
    assert next_one.recv() == "ready"
    waiter = spawn(wait_for_the_second, STRANGER)
    assert waiter.recv() == "waits"
    victim.kill()
    assert waiter.join() == ("victim", victim.pid)
    stop(next_one)


# -- whom a guest trusts


def test_another_uids_directory_is_used_only_if_its_owner_is_trusted(
    broker: Child, place: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/shm is everybody's: who lets us in may be somebody who wants us to come."""
    for owner in ("", str(STRANGER)):
        monkeypatch.setenv("IPCSYNC_RUNTIME_OWNER", owner)
        said = spawn(tried, GUEST).join()
        assert said.startswith("permission_denied: ")
        assert f"IPCSYNC_RUNTIME_OWNER={OWNER}" in said


def test_only_the_owner_starts_a_broker(place: Path, spawn: Spawn) -> None:
    guests.admit(place, frozenset({GUEST}))
    said = spawn(start, GUEST).join()
    assert said.startswith("permission_denied: ")
    assert "who alone starts its broker" in said
    assert not list(place.iterdir()), "nothing was made"


def test_a_guest_does_not_make_the_owners_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the owner would find it taken."""
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(place / "gone"))
    with pytest.raises(errors.BrokerUnavailable, match=f"uid {OWNER}'s to make"):
        ipcsync.connect(start_broker=True)
    assert not list(place.iterdir())
    monkeypatch.setenv("IPCSYNC_RUNTIME_OWNER", str(os.getuid()))
    assert directories.directory(create=True).stat().st_uid == os.getuid()
    (place / "gone").rmdir()


def start(peer: Peer, uid: int) -> str:
    return tried(peer, uid, start_broker=True)


def end(peer: Peer, uid: int) -> str:
    become(uid)
    from ipcsync_broker import launch

    with pytest.raises(errors.PermissionDenied) as caught:
        launch.stop()
    return str(caught.value)


def test_only_the_owner_stops_it(broker: Child, spawn: Spawn) -> None:
    assert "its owner stops it" in spawn(end, GUEST).join()
    assert spawn(tried, GUEST).join().startswith(f"uid {GUEST} is session")


def test_a_directory_that_is_open_to_a_group_is_refused(place: Path) -> None:
    """Whether by its mode or by a list."""
    os.chown(place, 0, 0)
    place.chmod(0o770)
    with pytest.raises(errors.PermissionDenied, match="0770"):
        directories.directory(create=False)
    place.chmod(0o700)
    guests.admit(place, frozenset({GUEST}))
    assert directories.directory(create=False) == place
    groups = guests.pack([GUEST], 7).replace(b"\x04\x00\x00\x00", b"\x04\x00\x05\x00")
    os.setxattr(place, "system.posix_acl_access", groups)
    with pytest.raises(errors.PermissionDenied, match="others may enter"):
        directories.directory(create=False)
    guests.admit(place, frozenset())
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_the_command_lets_in_whom_it_is_told_to(runtime: Path) -> None:
    """By its option, and by the environment, in the background too."""
    for arguments, env in (
        (["--allow-uid", str(GUEST), "--allow-uid", str(STRANGER)], {}),
        ([], {"IPCSYNC_BROKER_ALLOW_UID": f"{GUEST}, {STRANGER}"}),
    ):
        command = [sys.executable, "-m", "ipcsync_broker"]
        subprocess.run(
            [*command, "--detach", *arguments],
            env={**os.environ, **env},
            check=True,
            timeout=50,
            stdout=subprocess.DEVNULL,
        )
        try:
            assert guests.listed(runtime) == {GUEST, STRANGER}
        finally:
            subprocess.run(
                [sys.executable, "-m", "ipcsync_broker", "--stop"], check=True, timeout=50, capture_output=True
            )
