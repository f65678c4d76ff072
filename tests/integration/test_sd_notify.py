"""The broker under something that listens as systemd does: READY, WATCHDOG and STOPPING at the right moments."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..harness import Broker


class Manager:
    """The manager's end of the notification socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(20)

    def next(self) -> str:
        return self.socket.recv(4096).decode()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.socket.close()


def serves(runtime: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(runtime / "broker.sock")) == 0


def test_ready_watchdog_and_stopping(runtime: Path, manager: Manager) -> None:
    broker = Broker(runtime, env={"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "200000"})
    try:
        assert manager.next() == "READY=1"
        assert serves(runtime)  # READY comes only after the bind
        assert [manager.next() for _ in range(3)] == ["WATCHDOG=1"] * 3
        broker.process.send_signal(signal.SIGSTOP)
        while True:  # what it sent before it was stopped
            manager.socket.settimeout(0.5)
            try:
                manager.next()
            except TimeoutError:
                break  # a loop that does not turn says nothing: systemd would end it now
        manager.socket.settimeout(20)
        broker.process.send_signal(signal.SIGCONT)
        assert manager.next() == "WATCHDOG=1"
        broker.process.terminate()
        while (said := manager.next()) == "WATCHDOG=1":
            pass
        assert said == "STOPPING=1"
    finally:
        assert broker.stop() == 0
    assert not serves(runtime)


def test_another_processs_watchdog_is_not_ours(runtime: Path, manager: Manager) -> None:
    env = {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "50000", "WATCHDOG_PID": "1"}
    broker = Broker(runtime, env=env)
    assert manager.next() == "READY=1"
    time.sleep(0.3)
    assert broker.stop() == 0
    assert manager.next() == "STOPPING=1"


def test_an_abstract_socket_is_reached(runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{runtime.name}")
        manager.settimeout(20)
        broker = Broker(runtime, env={"NOTIFY_SOCKET": f"@{runtime.name}"})
        assert manager.recv(100) == b"READY=1"
        assert broker.stop() == 0
