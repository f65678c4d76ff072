"""A process that sees no GPU: every way to ask for one ends in a sentence. Runs on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync import Field, Session, errors

from ..harness import Child, Peer

Spawn = Callable[..., Child]


def _asks(peer: Peer) -> dict[str, str]:
    said = {}
    with ipcsync.connect() as session:
        for name, call in _calls(session).items():
            try:
                call()
                said[name] = "nothing was raised"
            except errors.IpcSyncError as error:
                said[name] = f"{error.code}: {error}"
        said["default"] = f"{ipcsync.Event().device} {ipcsync.Stream().device}"
        said["works"] = str(session.create_event("host").record())
    return said


def _calls(session: Session) -> dict[str, Callable[[], Any]]:
    return {
        "Event": lambda: ipcsync.Event("cuda"),
        "Event with an ordinal": lambda: ipcsync.Event("cuda:0", interprocess=True),
        "from_ipc_handle": lambda: ipcsync.Event.from_ipc_handle("cuda", b"\1" * 64),
        "Stream": lambda: ipcsync.Stream("cuda"),
        "current_stream": lambda: ipcsync.current_stream("cuda:0"),
        "create_event": lambda: session.create_event("e", device="cuda"),
        "create_channel": lambda: session.create_channel("c", shape=(1,), dtype="uint8", device="cuda"),
        "create_array": lambda: session.create_array("a", {"x": Field((1,), "uint8")}, device="cuda:0"),
    }


def test_every_call_says_that_there_is_no_gpu_and_names_doctor(
    broker: Any, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = spawn(_asks).join()
    assert said.pop("default") == "cpu cpu"
    assert said.pop("works") == "1"
    for name, text in said.items():
        assert "no CUDA device was found" in text, (name, text)
        assert "ipcsync doctor" in text, (name, text)
        assert 'device="cpu"' in text, (name, text)
