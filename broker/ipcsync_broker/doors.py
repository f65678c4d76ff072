"""The sockets that requests come through, and who may come in.

``Door`` is the runtime directory's: its socket has mode 0600 in a directory of mode 0700, and libzmq asks the kernel
for the uid of whoever connects (SO_PEERCRED). ``KeyedDoor`` is ``tcp://``: CURVE keys, and a list of those that are
allowed, asked by libzmq through ZAP (``Gate``). Refusals are counted, and said once for each who is refused.

A socket's descriptor tells only that something changed, so ``stirred`` says whether there may be something to read: it
is asked again after each receive, and set before each send, which may eat the edge.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from ipcsync import errors, keys, wire

from .logs import LOG

QUEUE = 1_000  # messages kept for one peer that does not read, or from one that is not read in time
ANNOUNCEMENTS = 10_000  # kept for one subscriber that does not read: further ones are dropped, and it sees a gap
IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID: libzmq asks SO_PEERCRED and refuses other uids; pyzmq has no name for it
_SAID, _AGAIN = 1000, 3600.0  # different refusals that are said, and seconds until one is said again
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Inlet:
    """A socket that the loop reads when it stirred."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.fd = int(socket.getsockopt(zmq.FD))
        self.stirred = True

    def readable(self) -> bool:
        self.stirred = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        return self.stirred

    def close(self) -> None:
        self.socket.close()


class Door(Inlet):
    """The runtime directory's ROUTER."""

    tag = b"i"  # before its peers' identities: those of different sockets must differ
    _events: int = zmq.EVENT_ACCEPT_FAILED

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, uids: frozenset[int]) -> None:
        super().__init__(router(context))
        self._watch()
        bind_private(self.socket, endpoint, uids)

    def _watch(self) -> None:
        self.refusals: Counter[str] = Counter()  # since `refused` was asked
        self.monitor = self.socket.get_monitor_socket(self._events)
        self._said: dict[str, float] = {}

    def _say(self, text: str) -> None:
        """Once: whoever is refused may knock again and again."""
        now = time.monotonic()
        if now - self._said.get(text, -_AGAIN) >= _AGAIN and len(self._said) < _SAID:
            self._said[text] = now
            LOG.warning("%s", text)

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

    def refused(self) -> Counter[str]:
        """Connections refused since the last call, by the count that they add to."""
        for event in self._failed():
            self._note(event)
        found, self.refusals = self.refusals, Counter()
        return found

    def _failed(self) -> Iterator[int]:
        while True:
            try:
                yield int(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["value"])
            except zmq.Again:
                return

    def _note(self, value: int) -> None:
        """libzmq could not accept a connection, or has hung up on another uid's."""
        if value in _FULL:
            self.refusals["refused_for_want_of_descriptors"] += 1
            self._say(f"connections cannot be accepted: {os.strerror(value)}")
        else:
            self.refusals["refused_uids"] += 1
            self._say("connections of another uid are refused")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        super().close()


class KeyedDoor(Door):
    """A ROUTER at ``tcp://``. A peer's name begins with the key that it proved to have."""

    tag = b"t"
    _events = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, where: Path) -> None:
        self.public, secret = keys.pair(where, keys.BROKER)
        self.allowed = keys.AllowList(where)
        self.gate = Gate(context, self)  # first: without one libzmq would let every key in
        Inlet.__init__(self, router(context))
        self._watch()
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, b"ipcsync")
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        try:
            self.socket.bind(keys.check_endpoint(endpoint))
        except zmq.ZMQError as error:
            self.close()
            raise errors.InvalidArgument(f"--tcp {endpoint}: {error.strerror}") from None
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
        self.gate.close()


class Gate(Inlet):
    """Answers libzmq's question whether a key may come in: ZAP, https://rfc.zeromq.org/spec/27/."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], door: KeyedDoor) -> None:
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


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    made = limited(context.socket(zmq.ROUTER), QUEUE)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent is an error to count, not silence
    return made


def publisher(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, uids: frozenset[int]) -> zmq.Socket[bytes]:
    made = limited(context.socket(zmq.PUB), ANNOUNCEMENTS)
    bind_private(made, endpoint, uids)
    return made


def limited(made: zmq.Socket[bytes], queue: int) -> zmq.Socket[bytes]:
    """With this broker's limits."""
    made.setsockopt(zmq.LINGER, 500)
    made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
    made.setsockopt(zmq.SNDHWM, queue)
    made.setsockopt(zmq.RCVHWM, queue)
    return made


def bind_private(socket: zmq.Socket[bytes], endpoint: str, uids: frozenset[int]) -> None:
    """Binds an ``ipc://`` endpoint that only these uids can reach, and only those who may enter its directory."""
    for uid in uids:
        socket.setsockopt(IPC_FILTER_UID, uid)
    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)  # of a dead broker: we hold the lock
    before = os.umask(0o177)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(before)
