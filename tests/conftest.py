"""Fixtures of every test: its own runtime directory, children, a broker, a session; a watchdog; a look for leaks."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .harness import KEPT, Broker, Child, Hang, Runtime, segments, unused

if TYPE_CHECKING:
    from ipcsync import Session

_SEGMENTS = pytest.StashKey[Any]()  # names in /dev/shm before the first test


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "watchdog(seconds): this test may take longer than 60 seconds")
    config.addinivalue_line(
        "markers", "leaves(*patterns): files that this test leaves on purpose (what a killed broker had made)"
    )
    # A test that forgot the `runtime` fixture must not meet the user's own broker.
    os.environ["IPCSYNC_RUNTIME_DIR"] = "/nonexistent/this-test-needs-the-runtime-fixture"
    config.stash[_SEGMENTS] = segments()
    resource_tracker.ensure_running()  # now, so that it carries no test's runtime directory in its environment


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # only whoever saw all of it can say
    left = segments() - session.config.stash[_SEGMENTS]
    if left := unused(left):  # what is in use belongs to somebody else's tests
        session.config.get_terminal_writer().line(f"\nleft in /dev/shm: {sorted(left)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _has_cuda() -> bool:
    try:
        return os.path.exists("/dev/nvidiactl") and bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not _has_cuda():
        if os.environ.get("IPCSYNC_REQUIRE_CUDA") == "1":
            pytest.fail("IPCSYNC_REQUIRE_CUDA=1, and there is no CUDA device")
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """SIGALRM ends a test that hangs, teardown included; if even that is stuck, the process says where and exits."""
    marker = item.get_closest_marker("watchdog")
    seconds = marker.args[0] if marker else 60

    def bark(*_: object) -> None:
        raise Hang(f"{item.nodeid} took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + 60, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh runtime directory, in IPCSYNC_RUNTIME_DIR for this process and all that it starts; no leak may remain."""
    made = Runtime()
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(made.path))
    try:
        yield made.path
        gc.collect()  # what a caught exception's frames still hold is no leak
        marker = request.node.get_closest_marker("leaves")
        left = made.leaks((*KEPT, *(marker.args if marker else ())))
        assert not left, "\n".join(left)
    finally:
        made.remove()


@pytest.fixture
def spawn(runtime: Path) -> Iterator[Callable[..., Child]]:
    """``spawn(fn, *args)``: runs ``fn(peer, *args)`` in a new process (`fn` at the top of its module)."""
    children: list[Child] = []

    def start(fn: Callable[..., Any], *args: Any) -> Child:
        children.append(Child(fn, args))
        return children[-1]

    yield start
    unseen = [error for child in children if (error := child.end()) is not None]
    if unseen:
        raise unseen[0]


@pytest.fixture
def broker(runtime: Path) -> Iterator[Broker]:
    """A broker that serves `runtime`. It must leave in order, unless the test ended it itself."""
    made = Broker(runtime)
    yield made
    ended = made.process.poll() is not None
    status = made.stop()
    assert ended or status == 0, f"the broker left with status {status}:\n{made.log()}"


@pytest.fixture
def session(broker: Broker) -> Iterator[Session]:
    """A session with the broker, in this process."""
    import ipcsync

    with ipcsync.connect() as made:
        yield made
