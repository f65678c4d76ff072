"""Frames that no client would send. The broker counts them, and serves a live session as if nothing were."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest

from ipcsync import wire

from ..harness import Broker, wait_until
from .raw_client import Clients, Raw, hello

FRAMES = 100_000
SEED = 20_26
JUNK: list[Any] = [
    None, True, -1, 0, 1 << 63, (1 << 64) - 1, 1.5, float("nan"), float("inf"), "", "x" * 5000, b"", b"\xff" * 5000,
    [], {}, [[]] * 50, {"a": {"b": {}}}, "default", "cpu", 7, -(1 << 63), "e1", "c1", 2, 3,
]  # fmt: skip
#: Complete nonsense, made by hand: what a length, an extension or a nesting can do to a careless reader.
WRECKS = [
    b"", b"\xc1", b"\x00", b"\x80", b"\x90", struct.pack(">BI", 0xC6, 0xFFFFFFFF), struct.pack(">BI", 0xDB, 0xFFFFFFFF),
    struct.pack(">BI", 0xDD, 0xFFFFFFFF), struct.pack(">BI", 0xDF, 0xFFFFFFFF), struct.pack(">BI", 0xC9, 0xFFFFFFFF),
    b"\x91" * 100_000, b"\x81\xa1a" * 30_000, msgpack.packb(msgpack.ExtType(5, b"x" * 10)),
    msgpack.packb({"v": 1, "id": 1, "op": "beat", "body": {"x": msgpack.ExtType(1, b"")}}), msgpack.packb(7),
    msgpack.packb({1: 2, None: 3}), b"\xa5\xff\xfe\xfd\xfc\xfb", msgpack.packb([1, 2, 3]), b"\xd6\xff" + b"\x00" * 4,
]  # fmt: skip


def requests(pid: int) -> list[dict[str, Any]]:
    """One valid request of every operation, as plain values; `pid` says hello."""
    field = wire.FieldSpec("array", (4,), "uint8")
    bodies: dict[str, msgspec.Struct] = {
        "hello": hello("hostile", pid=pid),
        "create_event": wire.CreateEvent("e1", "cpu"),
        "create_channel": wire.CreateChannel("c1", "cpu", wire.ChannelSpec(fields=(field,), stride=256, depth=2)),
        "create_array": wire.CreateArray("a1", "cpu", wire.ArraySpec(fields=(field,))),
        **{f"open_{kind}": wire.Open(kind, "e1") for kind in ("event", "channel", "array")},  # type: ignore[arg-type]
        **{op: wire.OPS[op][0](1) for op in ("detach", "pen", "pen_back", "mirror", "join_writer", "leave_writer")},
        "join_reader": wire.JoinReader(1),
        "leave_reader": wire.LeaveReader(1, 0),
        "unlink": wire.Unlink("e1"),
        "condemn": wire.Condemn(1),
        "suspect": wire.Suspect(0),
        "snapshot": wire.Snapshot(),
        "beat": wire.Beat(),
        "status": wire.Status(),
    }
    return [
        {"v": 1, "id": n, "op": op, "body": msgspec.to_builtins(body, builtin_types=(bytes,)), "left": 0.5}
        for n, (op, body) in enumerate(bodies.items())
    ]


def mutate(value: Any, rng: random.Random) -> Any:
    """A copy with one place changed: another value, something missing, or something more."""
    if rng.random() < 0.3 or not isinstance(value, dict | list | tuple) or not value:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.15:
            del changed[key]
        elif rng.random() < 0.15:
            changed[rng.choice(["extra", "v", "body", ""])] = rng.choice(JUNK)
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    at = rng.randrange(len(value))
    return [*value[:at], mutate(value[at], rng), *value[at + 1 :]]


def frames(rng: random.Random, count: int, pid: int) -> Iterator[list[bytes]]:
    valid = requests(pid)
    for _ in range(count):
        kind = rng.random()
        packed = msgpack.packb(rng.choice(valid))
        if kind < 0.55:
            value = dict(rng.choice(valid))
            for _ in range(rng.randrange(1, 4)):
                if rng.random() < 0.7 and isinstance(value.get("body"), dict):
                    value["body"] = mutate(value["body"], rng)  # so that most get as far as the operation itself
                else:
                    value = mutate(value, rng)
                if not isinstance(value, dict):
                    break
            try:
                packed = msgpack.packb(value)
            except (OverflowError, ValueError):
                packed = b"\xc1"
        elif kind < 0.75:
            broken = bytearray(packed)
            for _ in range(rng.randrange(1, 6)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            packed = bytes(broken)
        elif kind < 0.85:
            packed = packed[: rng.randrange(len(packed))] + rng.randbytes(rng.randrange(20))
        elif kind < 0.95:
            packed = rng.randbytes(rng.randrange(200))
        elif kind < 0.951:
            packed = rng.choice(WRECKS)
        else:
            yield [packed] * rng.choice([2, 7])
            continue
        yield [packed]


@pytest.mark.watchdog(300)
def test_a_hundred_thousand_frames(broker: Broker, runtime: Path) -> None:
    clients = Clients(runtime)
    hostile = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # whose sessions they are
    try:
        live = clients.session("live", namespace="live")
        event = live.call("create_event", wire.CreateEvent("mine", "cpu"))
        live.call("pen", wire.Pen(event.incarnation))
        stranger, member = clients.raw(), clients.session("hostile", pid=hostile.pid)
        before = counts(live)
        rng = random.Random(SEED)
        served = 0
        for n, message in enumerate(frames(rng, FRAMES, hostile.pid)):
            # A member is a session: its requests reach the handlers. A `bye` is not among them.
            (member if n % 3 else stranger).socket.send_multipart(message)
            if n % 1000 == 0:
                assert live.call("pen", wire.Pen(event.incarnation)) == wire.PenReply(0)
                drain(stranger)
                drain(member)
                served += 1
        for wreck in WRECKS:
            stranger.socket.send(wreck)
        after = settled(live, before, FRAMES + len(WRECKS) + served)
        assert served == FRAMES // 1000
        assert after["bad_messages"] > FRAMES // 3
        assert after["bad_messages.frames"] > 1000
        assert after["bad_messages.undecodable"] > 10_000
        assert after.get("broker_errors", 0) == 0, broker.log()
        assert live.call("pen", wire.Pen(event.incarnation)) == wire.PenReply(0)
        hostile.kill()
        wait_until(lambda: live.call("status", wire.Status())["sessions_total"] == 1, "the end of all that was hostile")
        assert live.call("bye", wire.Bye()) == wire.Empty()
    finally:
        hostile.kill()
        hostile.wait()
        clients.close()


def counts(live: Raw) -> dict[str, int]:
    found: dict[str, int] = live.call("status", wire.Status())["counts"]
    return found


def settled(live: Raw, before: dict[str, int], expected: int) -> dict[str, int]:
    """The counts once every frame sent was read: each is a request, or one of the two kinds that are none."""
    kinds = ("requests", "bad_messages.frames", "bad_messages.undecodable")
    asked = 1
    while True:
        found = counts(live)
        seen = sum(found.get(kind, 0) - before.get(kind, 0) for kind in kinds) - asked
        assert seen <= expected
        if seen == expected:
            return found
        asked += 1


def drain(client: Raw) -> None:
    while client.socket.poll(0):
        client.socket.recv()


def test_bytes_that_are_no_zmtp_and_a_frame_too_large(broker: Broker, runtime: Path) -> None:
    clients = Clients(runtime)
    rng = random.Random(SEED)
    try:
        live = clients.session("live")
        for name in ("broker.sock", "announce.sock", "pulse.sock"):
            for size in (0, 1, 9, 64, 70, 100_000):
                with socket.socket(socket.AF_UNIX) as raw:
                    raw.connect(str(runtime / name))
                    try:
                        raw.sendall(rng.randbytes(size))
                        raw.sendall(b"\xff" + b"\0" * 8 + b"\x7f" + rng.randbytes(size))
                    except OSError:
                        pass  # it hung up: as it should
        big = clients.raw()
        big.socket.send(b"x" * (wire.MAX_MESSAGE + 1))
        listener = clients.listener()
        listener.socket.setsockopt(6, b"\xff" * 5000)  # a topic of garbage
        listener.until("tick")
        assert live.call("beat", wire.Beat()) == wire.Empty()
        assert live.call("bye", wire.Bye()) == wire.Empty()
    finally:
        clients.close()
