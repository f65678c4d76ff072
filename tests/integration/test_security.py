"""Who may come in: other uids, planted files, and keys over tcp. Whoever is refused is counted, and said once."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

import ipcsync
from ipcsync import ask, errors, keys, wire
from ipcsync import runtime as directories
from ipcsync.keys_cli import keys as command

from ..harness import TIMEOUT, Broker, Child, Peer, wait_until
from .raw_client import Clients, hello

pytestmark = pytest.mark.fresh  # they count what their broker has, or end it
NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another uid, and become it")


def counts(runtime: Path) -> dict[str, int]:
    with ask.Asker(runtime) as asker:
        found: dict[str, int] = asker.status()["counts"]
    return found


# -- keys


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of keys of its own; what IPCSYNC_KEYS says in all processes."""
    made = tmp_path / "keys"
    monkeypatch.setenv("IPCSYNC_KEYS", str(made))
    return made


def call(*arguments: str) -> str:
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_keys_are_made_once_shown_allowed_listed_and_revoked(folder: Path) -> None:
    made = call("make")
    assert call("make") == made, "a pair is never overwritten"
    shown = json.loads(call("show", "--json"))
    assert made == f"broker {shown['broker']}\nclient {shown['client']}\n"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key_secret")} == {0o600}
    assert call("list") == "nobody\n"
    call("allow", "me")
    other = zmq.curve_keypair()[0].decode()
    call("allow", "robot", other)
    assert json.loads(call("list", "--json")) == {"me": shown["client"], "robot": other}
    call("revoke", "me")
    assert json.loads(call("list", "--json")) == {"robot": other}
    for wrong in (
        ["allow", "robot", shown["client"]],
        ["allow", "a b", other],
        ["allow", "x", other[1:]],
        ["revoke", "me"],
    ):
        with pytest.raises(errors.IpcSyncError):
            CliRunner().invoke(command, wrong, catch_exceptions=False)
    assert json.loads(call("list", "--json")) == {"robot": other}


def test_a_secret_that_others_could_read_is_refused(folder: Path) -> None:
    call("make")
    (folder / "client.key_secret").chmod(0o640)
    with pytest.raises(errors.PermissionDenied, match="0640"):
        keys.pair(folder, keys.CLIENT)
    (folder / "allowed").mkdir(mode=0o700)
    (folder / "allowed").chmod(0o777)
    with pytest.raises(errors.PermissionDenied):
        keys.allowed(folder)
    assert keys.AllowList(folder).name("x" * 40) is None


@pytest.mark.parametrize("text", ["tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://a/b:1", "tcp://::1:5"])
def test_endpoints_are_checked(folder: Path, text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="tcp://HOST:PORT"):
        ipcsync.connect(text)


# -- over tcp


@pytest.fixture
def tcp(runtime: Path, folder: Path) -> Iterator[Callable[[], tuple[Broker, str]]]:
    """Starts a broker with a key that allows the client's; (broker, endpoint)."""
    made: list[Broker] = []
    call("make")
    call("allow", "me")

    def start() -> tuple[Broker, str]:
        made.append(Broker(runtime, "--tcp", "tcp://127.0.0.1:0"))
        found = re.search(r"also at (tcp://127\.0\.0\.1:\d+)", made[-1].log())
        assert found, made[-1].log()
        return made[-1], found[1]

    yield start
    for broker in made:
        assert broker.stop() == 0, broker.log()


def consume(peer: Peer, endpoint: str) -> list[int]:
    with ipcsync.connect(endpoint, name="far") as session, session.open_channel("c").reader() as reader:
        peer.send("reads")
        return [int(slot.array[0]) for slot in reader.slots()]


def test_an_allowed_key_is_a_session_like_any_other(
    tcp: Callable[[], tuple[Broker, str]], spawn: Callable[..., Child]
) -> None:
    _, endpoint = tcp()
    with ipcsync.connect() as near, ipcsync.connect(endpoint) as far:
        channel = near.create_channel("c", shape=(1,), dtype="int64", device="cpu")
        event = far.create_event("e", device="cpu")
        near.open_event("e").wait(round=event.record())
        child = spawn(consume, endpoint)
        assert child.recv() == "reads"
        with channel.writer() as writer:
            for item in range(20):
                with writer.slot() as slot:
                    slot.array[...] = item
        assert child.join() == list(range(20))


def test_keys_may_come_from_the_environment(
    tcp: Callable[[], tuple[Broker, str]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, endpoint = tcp()
    monkeypatch.setenv(keys.SERVER_KEY, keys.public(folder, keys.BROKER) or "")
    monkeypatch.setenv(keys.SECRET_KEY, keys.pair(folder, keys.CLIENT)[1])
    monkeypatch.setenv("IPCSYNC_KEYS", str(tmp_path / "none"))
    with ipcsync.connect(endpoint) as session:
        assert session.create_event("e", device="cpu").record() == 1


def test_an_unknown_key_is_refused_at_once_counted_and_said_once(
    tcp: Callable[[], tuple[Broker, str]], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, endpoint = tcp()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    monkeypatch.setenv(keys.SECRET_KEY, secret)
    for _ in range(8):
        with pytest.raises(errors.PermissionDenied, match=f"ipcsync keys allow NAME {re.escape(public)}"):
            ipcsync.connect(endpoint, timeout=None)
    wait_until(lambda: counts(runtime).get("refused_keys", 0) >= 8, "the count of refusals")
    assert broker.log().count(public) == 1
    call("allow", "late", public)
    with ipcsync.connect(endpoint) as session:
        assert session.create_event("e", device="cpu").record() == 1


def test_a_revoked_key_is_refused_over_a_connection_that_stands(
    tcp: Callable[[], tuple[Broker, str]], runtime: Path, folder: Path
) -> None:
    _, endpoint = tcp()
    with ipcsync.connect(endpoint) as session:
        event = session.create_event("e", device="cpu")
        event.record()
        call("revoke", "me")
        with pytest.raises(errors.PermissionDenied, match="revoked"):
            session.create_event("f", device="cpu")
        event.synchronize(round=event.record())  # what is attached does not go by the broker
        with pytest.raises(errors.PermissionDenied, match="does not allow"):
            ipcsync.connect(endpoint, timeout=None)
        call("allow", "me")
        session.create_event("f", device="cpu")
    wait_until(lambda: counts(runtime).get("refused_keys", 0) >= 2, "the count of refusals")


def test_who_speaks_no_curve_or_has_another_brokers_key_is_refused(
    tcp: Callable[[], tuple[Broker, str]], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, endpoint = tcp()
    host, port = endpoint.removeprefix("tcp://").split(":")
    status = wire.encode(wire.Request(wire.PROTOCOL_MAX, 1, "status", {}, 5.0))
    with ipcsync.connect() as live, zmq.Context() as context:
        event = live.create_event("e", device="cpu")
        with context.socket(zmq.DEALER) as plain, context.socket(zmq.DEALER) as passworded:
            passworded.plain_username, passworded.plain_password = b"admin", b"admin"
            for stranger in (plain, passworded):
                stranger.linger = 0
                stranger.connect(endpoint)
                stranger.send(status)
            wait_until(lambda: counts(runtime).get("refused_handshakes", 0) >= 2, "the refusals")
            assert not plain.poll(100)
            assert not passworded.poll(0)
        with socket.create_connection((host, int(port))) as raw:
            raw.settimeout(TIMEOUT)
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 200)
            with suppress(ConnectionResetError):
                while raw.recv(1000):
                    pass  # it says who it is, as every ZeroMQ does, and hangs up
        monkeypatch.setenv(keys.SERVER_KEY, zmq.curve_keypair()[0].decode())
        with pytest.raises(errors.BrokerUnavailable, match="with the public key"):
            ipcsync.connect(endpoint, timeout=0.5)
        assert event.record() == 1
        live.create_event("f", device="cpu")
    assert broker.log().count("do not speak CURVE") == 1


def test_what_is_missing_is_said_with_how_to_get_it(runtime: Path, folder: Path) -> None:
    with pytest.raises(errors.NotFound, match="ipcsync keys show"):
        ipcsync.connect("tcp://127.0.0.1:5757")
    tried = broker_ended(runtime, "--tcp", "tcp://127.0.0.1:0")
    assert tried.returncode == 1
    assert "ipcsync keys make" in tried.stderr
    call("make")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tried = broker_ended(runtime, "--tcp", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert tried.returncode == 1
    assert "in use" in tried.stderr
    assert len(tried.stderr.splitlines()) == 1
    with pytest.raises(errors.InvalidArgument, match="--tcp"):
        ipcsync.connect("tcp://127.0.0.1:5757", start_broker=True)


def broker_ended(runtime: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A broker that ends by itself."""
    command = [sys.executable, "-m", "ipcsync_broker", *arguments]
    env = {**os.environ, "IPCSYNC_RUNTIME_DIR": str(runtime)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)


def test_a_client_elsewhere_is_refused_clearly(
    tcp: Callable[[], tuple[Broker, str]], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, endpoint = tcp()
    clients = Clients(runtime)
    try:
        refused = clients.raw().call("hello", hello(boot_id="another-machines"))
        assert (refused.code, "another machine" in refused.message) == ("unsupported", True)
        assert counts(runtime)["refused_machines"] == 1
    finally:
        clients.close()
    elsewhere = runtime / "elsewhere"
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(elsewhere))
    with pytest.raises(errors.Unsupported, match="shares its /dev/shm"):
        ipcsync.connect(endpoint)
    elsewhere.mkdir(mode=0o700)
    with pytest.raises(errors.Unsupported, match="shares its /dev/shm"):
        ipcsync.connect(endpoint)
    (elsewhere / "ledger").write_bytes(changed((runtime / "ledger").read_bytes()))
    with pytest.raises(errors.Unsupported, match="shares its /dev/shm"):
        ipcsync.connect(endpoint)
    (elsewhere / "ledger").unlink()
    elsewhere.rmdir()


def changed(page: bytes) -> bytes:
    """The same page of another broker."""
    return page[:32] + b"\x01" * 16 + page[48:]


# -- another uid

_AS_NOBODY = """
import os, sys
from pathlib import Path
import ipcsync, msgspec, zmq
from ipcsync import runtime, wire
from tests.integration.raw_client import hello
os.environ["HOME"] = "/nonexistent"
try:
    ipcsync.connect("/nonexistent/at-all")  # so that all is imported that nobody could not read
except ipcsync.BrokerUnavailable:
    pass
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
directory = Path(sys.argv[1])
for call in (lambda: ipcsync.connect(directory), lambda: runtime.directory(directory, create=True)):
    try:
        call()
    except ipcsync.IpcSyncError as error:
        print(error.code)
frame = wire.encode(wire.Request(1, 1, "hello", msgspec.to_builtins(hello(uid=0)), 5.0))
with zmq.Context() as context:
    for _ in range(20):  # it would try again by itself; so it does at once
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(runtime.broker_endpoint(directory))
            dealer.send(frame)
            if dealer.poll(50):
                print("answered")
"""


@needs_root
@pytest.mark.parametrize("opened", [False, True], ids=["by its modes", "by its credentials"])
def test_another_uid_gets_nowhere(broker: Broker, session: ipcsync.Session, opened: bool) -> None:
    """The directory keeps it out; and where somebody opened that, the kernel's word on who it is."""
    runtime, env = broker.runtime, {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if opened:
        runtime.chmod(0o711)
        (runtime / "broker.sock").chmod(0o666)
    try:
        child = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, str(runtime)],
            env=env,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    finally:
        runtime.chmod(0o700)
    assert child.stdout.split() == ["permission_denied"] * 2, child.stderr
    if opened:
        wait_until(lambda: counts(runtime).get("refused_uids", 0) >= 20, "the count of refusals")
        assert broker.log().count("another uid") == 1
    else:
        assert "refused_uids" not in counts(runtime), "it did not come so far"
    assert session.create_event("e", device="cpu").record() == 1


@needs_root
def test_a_process_of_another_uid_is_no_session(broker: Broker) -> None:
    """Whatever it says of itself."""
    clients = Clients(broker.runtime)
    other = subprocess.Popen(["sleep", "600"], user=NOBODY, group=NOBODY)
    try:
        for said in (NOBODY, os.getuid()):
            refused = clients.raw().call("hello", hello(uid=said, pid=other.pid))
            assert refused.code == "permission_denied"
            assert str(NOBODY) in refused.message
        assert counts(broker.runtime)["refused_uids"] == 2
    finally:
        other.kill()
        other.wait()
        clients.close()


# -- planted

FIXED = ["broker.lock", "broker.sock", "announce.sock", "pulse.sock", "ledger", "journal", "l1"]


def right(name: str) -> str:
    return {"l1": "directory"}.get(name, "socket" if name.endswith("sock") else "file")


def plant(path: Path, kind: str, elsewhere: Path) -> None:
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as planted:
            planted.bind(str(path))
    else:
        path.write_bytes(b"planted")


def refusals(runtime: Path) -> list[str]:
    """What a broker and a session say, and nothing more than that."""
    told = []
    for arguments in ([], ["--detach"]):
        tried = broker_ended(runtime, *arguments)
        assert tried.returncode == 2, tried.stderr
        assert len(tried.stderr.splitlines()) == 1, tried.stderr
        told.append(tried.stderr)
    with pytest.raises((errors.PermissionDenied, errors.RuntimeDirectory)) as caught:
        ipcsync.connect(start_broker=True)
    return [*told, str(caught.value)]


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("kind", ["link", "directory", "socket", "file"])
def test_what_is_not_of_its_kind_is_refused_and_left_alone(runtime: Path, tmp_path: Path, name: str, kind: str) -> None:
    if kind == right(name):
        kind = "link"
    precious = tmp_path / "precious"
    precious.write_text("precious")
    plant(runtime / name, kind, precious)
    before = (runtime / name).lstat()
    for said in refusals(runtime):
        assert str(runtime / name) in said
        assert "remove it" in said
    after = (runtime / name).lstat()
    assert (before.st_ino, before.st_mode, before.st_mtime_ns) == (after.st_ino, after.st_mode, after.st_mtime_ns)
    assert precious.read_text() == "precious"
    assert [path.name for path in runtime.iterdir()] == [name], "nothing was made"
    (runtime / name).rmdir() if kind == "directory" else (runtime / name).unlink()


@needs_root
@pytest.mark.parametrize("name", [*FIXED, "ctl-1", "mem-1", "broker.log", "life-" + "0" * 32])
def test_what_another_uid_left_in_the_directory_is_refused_and_left_alone(runtime: Path, name: str) -> None:
    """It could, if the directory was once open to it."""
    plant(runtime / name, right(name), runtime)
    os.chown(runtime / name, NOBODY, NOBODY)
    before = (runtime / name).lstat()
    for said in refusals(runtime):
        assert f"{runtime / name} belongs to uid {NOBODY}" in said
    if name in FIXED:
        with pytest.raises(errors.PermissionDenied, match=str(NOBODY)):
            directories.directory(create=False)
    assert before == (runtime / name).lstat()
    assert [path.name for path in runtime.iterdir()] == [name]
    (runtime / name).rmdir() if name == "l1" else (runtime / name).unlink()


@needs_root
def test_another_uids_directory_under_the_default_name_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/shm is everybody's: somebody may have been there before us."""
    squatted = runtime / "squatted"
    squatted.mkdir(mode=0o700)
    os.chown(squatted, NOBODY, NOBODY)
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(squatted))
    for create in (False, True):
        with pytest.raises(errors.PermissionDenied, match=f"uid {NOBODY}"):
            directories.directory(create=create)
    assert not list(squatted.iterdir())
    squatted.rmdir()
