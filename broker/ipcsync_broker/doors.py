"""The sockets that the broker listens at, who may come in, and how many.

``Door`` is the runtime directory's: its socket has mode 0600 in a directory of mode 0700 (or is open to those uids that
the directory lets in: ``guests.py``), and libzmq asks the kernel for the uid of whoever connects (SO_PEERCRED).
``KeyedDoor`` is ``tcp://``: CURVE keys, and a list of those that are allowed, asked by libzmq through ZAP (``Gate``).
``Publisher`` announces, in the runtime directory. Refusals are counted, and said once for each who is refused.

A socket's descriptor tells only that something changed, so ``stirred`` says whether there may be something to read: it
is asked again after each receive, and set before each send, which may eat the edge.

libzmq's listener at a Unix socket aborts the process when no file descriptor is left for a connection, and unbinding
would close every connection. So each socket counts its connections by its monitor, and hangs up on those that are too
many. The monitor holds at most ``UNSEEN`` events, then libzmq waits for us to look: more cannot be made between looks.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from ipcsync import errors, guests, keys, life, wire

from .logs import LOG

QUEUE = 1_000  # messages kept for one peer that does not read, or from one that is not read in time
ANNOUNCEMENTS = 10_000  # kept for one subscriber that does not read: further ones are dropped, and it sees a gap
CONNECTIONS = 4_096  # at one socket
UNSEEN = 1_000 + 10  # events that a monitor holds: its sender's default queue, and ours
OWN = 400  # descriptors that are not connections, beside one for each session
IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID: libzmq asks SO_PEERCRED and refuses other uids; pyzmq has no name for it
_SAID, _AGAIN = 1000, 3600.0  # different refusals that are said, and seconds until one is said again

Context = zmq.Context[zmq.Socket[bytes]]


def connections(sockets: int, sessions: int) -> int:
    """How many connections each of the sockets may have, by the process's limit of descriptors."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OWN - sessions
    safe = room // sockets - UNSEEN
    if safe < sessions:
        LOG.warning(
            "the limit of file descriptors is %d, so a crowd of connections may end this broker: `ulimit -n %d`",
            room + OWN + sessions,
            OWN + sessions + sockets * (UNSEEN + sessions),
        )
        return max(room // sockets // 2, 8)
    return min(CONNECTIONS + sessions, safe)


class Inlet:
    """A socket that the loop reads when it stirred."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.stirred = True

    @property
    def fd(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def readable(self) -> bool:
        self.stirred = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        return self.stirred


class Listener(Inlet):
    """A bound socket that counts its connections."""

    def __init__(self, made: zmq.Socket[bytes], endpoint: str, most: int, queue: int) -> None:
        super().__init__(made)
        self.endpoint, self.most = endpoint, most
        self.connected: set[int] = set()  # descriptors, as libzmq told
        self.refusals: Counter[str] = Counter()
        self._said: dict[str, float] = {}
        made.setsockopt(zmq.LINGER, 500)
        made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
        made.setsockopt(zmq.SNDHWM, queue)
        made.setsockopt(zmq.RCVHWM, queue)
        at = f"inproc://monitor-{id(self)}"
        made.monitor(at, self._failures() | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.monitor = Inlet(made.context.socket(zmq.PAIR))
        self.monitor.socket.setsockopt(zmq.RCVHWM, UNSEEN - 1000)
        self.monitor.socket.connect(at)

    def _failures(self) -> int:
        return zmq.EVENT_ACCEPT_FAILED

    @property
    def due(self) -> bool:
        """Whether there may be something to look at."""
        return self.monitor.stirred

    def _bind(self) -> None:
        """At an ``ipc://`` endpoint, which only those can reach who may enter its directory."""
        path = Path(self.endpoint.removeprefix("ipc://"))
        path.unlink(missing_ok=True)  # of a dead broker: we hold the lock
        before = os.umask(0o777 & ~guests.file_mode(path.parent))
        try:
            self.socket.bind(self.endpoint)
        finally:
            os.umask(before)

    def look(self) -> None:
        """Counts connections, and hangs up on those that are too many."""
        for _ in range(UNSEEN):  # while we read, more come
            if not self.monitor.readable():
                break
            event = parse_monitor_message(self.monitor.socket.recv_multipart(zmq.NOBLOCK))
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self.connected.discard(event["value"])
            else:
                self._note(event["value"])

    def refused(self) -> Counter[str]:
        """Refusals since the last call, by the count that they add to."""
        found, self.refusals = self.refusals, Counter()
        return found

    def _accepted(self, fd: int) -> None:
        self.connected.add(fd)
        if len(self.connected) > self.most:
            _hang_up(fd)
            self.refusals["refused_surplus"] += 1
            self._say(f"{self.endpoint} has {self.most} connections: more are refused until some are closed")

    def _note(self, value: int) -> None:
        """libzmq could not accept a connection, or has hung up on another uid's."""
        self.refusals["refused_uids"] += 1
        self._say("connections of another uid are refused")

    def _say(self, text: str) -> None:
        """Once: whoever is refused may knock again and again."""
        now = time.monotonic()
        if now - self._said.get(text, -_AGAIN) >= _AGAIN and len(self._said) < _SAID:
            self._said[text] = now
            LOG.warning("%s", text)

    def close(self) -> None:
        self.look()  # libzmq must not wait for us to see an event while we wait for it
        self.socket.monitor(None, 0)
        self.monitor.socket.close()
        self.socket.close()


def _hang_up(fd: int) -> None:
    """On a connection of libzmq's, which then closes it."""
    try:
        with socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it hung up itself


class Publisher(Listener):
    def __init__(self, context: Context, endpoint: str, uids: frozenset[int], most: int) -> None:
        super().__init__(context.socket(zmq.PUB), endpoint, most, ANNOUNCEMENTS)
        for uid in uids:
            self.socket.setsockopt(IPC_FILTER_UID, uid)
        self._bind()

    def send(self, topic: bytes, payload: bytes) -> None:
        self.socket.send_multipart([topic, payload], zmq.NOBLOCK)


class Pulse(Listener):
    """Where sessions in other pid namespaces stay connected, each under the name of its file (``life.py``). libzmq asks
    and answers heartbeats by itself: whoever does not answer is stopped, and its connection is closed.

    A client's libzmq sends an empty message whenever it has connected (ZMQ_PROBE_ROUTER). Nothing is sent to it: what
    it did not read would keep its libzmq from reading heartbeats."""

    def __init__(self, context: Context, endpoint: str, uids: frozenset[int], most: int) -> None:
        super().__init__(context.socket(zmq.ROUTER), endpoint, most, QUEUE)
        for option, value in (
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.HEARTBEAT_IVL, 500),
            (zmq.HEARTBEAT_TIMEOUT, 2000),
            *((IPC_FILTER_UID, uid) for uid in uids),
        ):
            self.socket.setsockopt(option, value)
        self._bind()
        self._of: dict[str, int] = {}  # name -> the descriptor of its last connection

    @property
    def due(self) -> bool:
        return self.stirred or self.monitor.stirred

    def look(self) -> None:
        probes = list(self._probes())  # before the events: a descriptor's end was told before it was used again
        super().look()
        self._of |= {name: fd for name, fd in probes if fd in self.connected}

    def _probes(self) -> Iterator[tuple[str, int]]:
        for _ in range(QUEUE):
            if not self.readable():
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                name = bytes(frames[0].buffer).decode("ascii")
            except (zmq.Again, UnicodeDecodeError):
                continue
            if re.fullmatch(life.PATTERN, name) and (name in self._of or len(self._of) < _SAID):
                yield name, int(frames[-1].get("__fd"))

    def lost(self, name: str) -> bool:
        """Whether it was connected, and is no longer."""
        return name in self._of and self._of[name] not in self.connected

    def forget(self, name: str) -> None:
        self._of.pop(name, None)


class Door(Listener):
    """The runtime directory's ROUTER."""

    tag = b"i"  # before its peers' identities: those of different sockets must differ

    def __init__(self, context: Context, endpoint: str, uids: frozenset[int], most: int) -> None:
        super().__init__(context.socket(zmq.ROUTER), endpoint, most, QUEUE)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent is an error to count, not silence
        for uid in uids:
            self.socket.setsockopt(IPC_FILTER_UID, uid)
        self._bind()

    def receive(self) -> list[bytes] | None:
        """The next message, the peer first; None when there is none."""
        while self.readable():
            try:
                return self._take()
            except zmq.Again:
                pass
        return None

    def _take(self) -> list[bytes]:
        peer, *rest = self.socket.recv_multipart(zmq.NOBLOCK)
        return [self.tag + peer, *rest]

    def send(self, peer: bytes, payload: bytes) -> None:
        """``zmq.ZMQError`` when the peer is gone, or does not read."""
        self.stirred = True  # sending may eat the edge that says that there is something to read
        self.socket.send_multipart([self._identity(peer), payload], zmq.NOBLOCK)

    def _identity(self, peer: bytes) -> bytes:
        return peer[1:]

    def refusal(self, peer: bytes) -> errors.IpcSyncError | None:
        """Why a peer's message is not to be read."""
        return None


class KeyedDoor(Door):
    """A ROUTER at ``tcp://``. A peer's name begins with the key that it proved to have."""

    tag = b"t"

    def __init__(self, context: Context, endpoint: str, where: Path, most: int) -> None:
        keys.check_endpoint(endpoint)
        self.public, secret = keys.pair(where, keys.BROKER)
        self.allowed = keys.AllowList(where)
        self.gate = Gate(context, self)  # first: without one libzmq would let every key in
        Listener.__init__(self, context.socket(zmq.ROUTER), endpoint, most, QUEUE)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, "[" in endpoint),
            (zmq.CURVE_SECRETKEY, secret.encode()),
            (zmq.CURVE_PUBLICKEY, self.public.encode()),
            (zmq.CURVE_SERVER, 1),
            (zmq.ZAP_DOMAIN, b"ipcsync"),
            (zmq.HANDSHAKE_IVL, 5000),
        ):
            self.socket.setsockopt(option, value)
        try:
            self._bind()
        except zmq.ZMQError as error:
            self.close()
            raise errors.InvalidArgument(f"--tcp {endpoint}: {error.strerror}") from None

    def _failures(self) -> int:
        return zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

    def _bind(self) -> None:
        self.socket.bind(self.endpoint)
        self.endpoint = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _take(self) -> list[bytes]:
        peer, *rest = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        key = str(rest[0].get("User-Id")) if rest else ""
        return [self.tag + key.encode().ljust(40) + bytes(peer.buffer), *(bytes(frame.buffer) for frame in rest)]

    def _identity(self, peer: bytes) -> bytes:
        return peer[41:]

    def refusal(self, peer: bytes) -> errors.IpcSyncError | None:
        key = peer[1:41].decode()
        if self.admits(key, "a connection that stands"):
            return None
        return errors.PermissionDenied(f"the key {key} was revoked: `ipcsync keys allow` lets it in again")

    def admits(self, key: str, address: str) -> bool:
        if self.allowed.name(key) is not None:
            return True
        self.refusals["refused_keys"] += 1
        self._say(f"tcp: the key {key} ({address}) is not allowed and is refused")
        return False

    def _note(self, value: int) -> None:
        """No CURVE, the wrong key for us, or not ZeroMQ at all."""
        self.refusals["refused_handshakes"] += 1
        self._say("tcp: connections that do not speak CURVE with our key are refused")

    def close(self) -> None:
        super().close()
        self.gate.socket.close()


class Gate(Inlet):
    """Answers libzmq's question whether a key may come in: ZAP, https://rfc.zeromq.org/spec/27/."""

    def __init__(self, context: Context, door: KeyedDoor) -> None:
        super().__init__(context.socket(zmq.REP))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")
        self._door = door

    def answer(self) -> None:
        """Answers what was asked."""
        while self.readable():
            try:
                self.socket.send_multipart(self._reply(self.socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                pass

    def _reply(self, asked: list[bytes]) -> list[bytes]:
        version, id, _, address, _, mechanism, *credentials = [*asked, *[b""] * 6][: max(7, len(asked))]
        if version == b"1.0" and mechanism == b"CURVE" and len(credentials[0]) == 32:
            from zmq.utils import z85

            key = z85.encode(credentials[0])
            if self._door.admits(key.decode(), address.decode(errors="replace")):
                return [b"1.0", id, b"200", b"OK", key, b""]
        return [b"1.0", id, b"400", b"this key is not allowed", b"", b""]
