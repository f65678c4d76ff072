"""The wait budget on a GPU (docs/design/ledger.md, rule 10): as many waiting streams as there are hardware queues."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync import errors
from ipcsync.backends import select

from ..harness import Child, Peer
from . import gpu

pytestmark = [pytest.mark.cuda, pytest.mark.fresh("children")]  # what CUDA reads as it starts
Spawn = Callable[..., Child]


def _queues(backend: Any) -> int:
    backend.blocked_limit(0)
    return int(backend._queues[0])


def _start(connections: str | None) -> Any:
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    warnings.simplefilter("ignore", RuntimeWarning)  # the budget's own
    return select.backend("cuda")


def _releases(peer: Peer) -> None:
    """Completes a round of `gate` once `go` has one."""
    with ipcsync.connect(name="other", manage_env=False) as session:
        go, gate, stream = session.open_event("go"), session.open_event("gate"), ipcsync.Stream("cuda")
        peer.send("attached")
        go.wait(stream, round=1)
        gate.record(stream)
        peer.send("recorded")
        stream.synchronize()


def _waits(peer: Peer, connections: str | None) -> int:
    """Every stream waits for `gate`; that waits for the record of `go` that another thread makes here, last of all."""
    backend = _start(connections)
    with ipcsync.connect(name="many", manage_env=False) as session:
        go, gate = session.create_event("go", device="cuda"), session.create_event("gate", device="cuda")
        queues = _queues(backend)
        streams = [ipcsync.Stream("cuda") for _ in range(queues)]
        behind = ipcsync.Stream("cuda")
        gpu.spin(backend, behind._raw, 0)
        peer.send("created")
        peer.recv()
        problems: list[BaseException] = []

        def wait(stream: ipcsync.Stream) -> None:
            try:
                gate.wait(stream, round=1, timeout=20)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=wait, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        gpu.spin(backend, behind._raw, 20)
        go.record(behind)
        for thread in threads:
            thread.join()
        for stream in [*streams, behind]:
            stream.synchronize()
        if problems:
            raise problems[0]
        return queues


@pytest.mark.parametrize("connections", [None, "32"])
def test_waiting_streams_do_not_stop_what_would_release_them(
    broker: Any, spawn: Spawn, connections: str | None
) -> None:
    many = spawn(_waits, connections)
    assert many.recv(60) == "created"
    other = spawn(_releases)
    assert other.recv(60) == "attached"
    many.send("go")
    assert many.join() >= 2
    other.join()


def _one_thread(peer: Peer) -> str:
    backend = _start(None)
    with ipcsync.connect(name="one", manage_env=False) as session:
        gate = session.open_event("held")
        streams = [ipcsync.Stream("cuda") for _ in range(_queues(backend))]

        def wait_on_all() -> None:
            for stream in streams:
                gate.wait(stream, round=1, timeout=0.5)

        with pytest.raises(errors.WaitTimeout) as found:
            wait_on_all()
        with pytest.raises(errors.WouldBlock):
            gate.wait(streams[-1], round=1, block=False)
        peer.send("beyond")
        for stream in streams:
            stream.synchronize()
        gate.wait(streams[-1], round=1)
        return str(found.value)


def test_one_thread_beyond_the_budget_is_told_so(broker: Any, spawn: Spawn) -> None:
    backend = select.backend("cuda")
    with ipcsync.connect(manage_env=False) as session:
        event, stream = session.create_event("held", device="cuda"), ipcsync.Stream("cuda")
        gpu.spin(backend, stream._raw, 0)
        stream.synchronize()
        word = gpu.page(session.runtime)
        backend.register(word)
        backend.wait(stream._raw, word, 0, 1)
        event.record(stream)
        child = spawn(_one_thread)
        assert child.recv(60) == "beyond"
        word.words[0] = 1
        assert "budget" in child.join()
        event.synchronize()
        backend.unregister(word)
        word.path.unlink()
