"""An overview with one of everything, as ``ipcsync.overview`` makes it."""

from __future__ import annotations

from typing import Any


def thing(kind: str, name: str, incarnation: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "namespace": "default",
        "name": name,
        "incarnation": incarnation,
        "cell": incarnation,
        "device": "cpu",
        "via": "timeline",
        "attached": 2,
        "pen": 1,
        "named": True,
        "ended": False,
        "condemned": False,
        "bytes": 0,
        "issued": 7,
        "completed": 5,
        "verdict": None,
        "recorder": {"session": 1, "name": "read", "pid": 101},
        **more,
    }


def reader(name: str, **more: Any) -> dict[str, Any]:
    who = {"session": 2, "name": name, "pid": 102}
    return {
        "reader": who,
        "policy": "block",
        "retired": False,
        "held": 1,
        "behind": 2,
        "skipped": 0,
        "taken": 4,
        **more,
    }


def session(number: int, name: str, **more: Any) -> dict[str, Any]:
    return {
        "session": number,
        "block": number - 1,
        "name": name,
        "namespace": "default",
        "pid": 100 + number,
        "state": "live",
        "lease_out": False,
        "attached": 1,
        "readers": 0,
        "silent": 0.5,
        "process": "running",
        "long_waits": {"came": 3, "timed_out": 1, "ended": 0},
        **more,
    }


def sample() -> dict[str, Any]:
    return {
        "broker": {
            "pid": 100,
            "version": "0.1.0",
            "uptime": 12.5,
            "directory": "/dev/shm/ipcsync-1000",
            "tick_age": 0.01,
            "sessions": 2,
            "things": 3,
            "bytes": 4096,
            "announced": 9,
            "loop": {"late": [[0.001, 90], [0.1, 9], [None, 1]], "late_sum": 0.5},
        },
        "quotas": {"sessions": 256, "events": 16384, "channels": 4096, "nbytes": None},
        "counts": {"requests": 20, "bad_messages": 1, "deaths": 2, "condemned": 1},
        "sessions": [session(1, "read"), session(2, "edges")],
        "events": [thing("event", "frame", 1)],
        "channels": [
            thing(
                "channel", "frames", 2, bytes=4096, depth=4, max_readers=16, epoch=1, stream_ended=False,
                occupancy=0.75, item_bytes=1024, readers=[reader("edges"), reader("edges", behind=1, skipped=3)],
            )
        ],
        "arrays": [thing("array", "weights", 3, depth=0, max_readers=16, readers=[])],
    }  # fmt: skip
