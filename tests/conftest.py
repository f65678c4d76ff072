"""Fixtures of every test: its own runtime directory, children, a broker, a session; a watchdog; a look for leaks."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .harness import KEPT, Broker, Child, Hang, segments, unused
from .places import Runtime, came_back, sweep
from .pool import NOWHERE, Shared, environment, shares

if TYPE_CHECKING:
    from ipcsync import Session

_FAILED = pytest.StashKey[bool]()
_SEGMENTS = pytest.StashKey[Any]()  # names in /dev/shm before the first test


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "watchdog(seconds): this test may take longer than 60 seconds")
    config.addinivalue_line(
        "markers", "leaves(*patterns): files that this test leaves on purpose (what a killed broker had made)"
    )
    config.addinivalue_line("markers", 'fresh(*what): "children", or a "broker", that no other test has (pool.py)')
    # A test that forgot the `runtime` fixture must not meet the user's own broker.
    os.environ["IPCSYNC_RUNTIME_DIR"] = NOWHERE
    if not hasattr(config, "workerinput"):
        sweep()  # of runs before that were killed
    config.stash[_SEGMENTS] = segments()
    resource_tracker.ensure_running()  # now, so that it carries no test's runtime directory in its environment


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # only whoever saw all of it can say
    if swept := sweep():  # a crash is reported by whoever it happened to, or was wanted (a planted bug)
        session.config.get_terminal_writer().line(f"\nremoved from /dev/shm, of tests that are dead: {sorted(swept)}")
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
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


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


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """What tests at a GPU share (pool.py)."""
    made = Shared()
    yield made
    problems = made.close()
    if log := os.environ.get("IPCSYNC_TEST_LOG"):
        with open(log, "a") as file:
            file.write(f"shared in {os.environ.get('PYTEST_XDIST_WORKER', 'main')}: {made}\n")
    problems += [f"{path} was made again after its test" for path in came_back()]
    assert not problems, "\n".join(problems)


@pytest.fixture
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shared: Shared) -> Iterator[Path]:
    """A fresh runtime directory, in IPCSYNC_RUNTIME_DIR for this process and all that it starts; no leak may remain.

    Where the test shares its broker it is that one's directory, and IPCSYNC_NAMESPACE is fresh.
    """
    marker = request.node.get_closest_marker("leaves")
    leaves = marker.args if marker else ()
    if "broker" in request.fixturenames and shares(request.node, "broker"):
        place = shared.at()
        monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(place.path))
        monkeypatch.setenv("IPCSYNC_NAMESPACE", place.namespace())
        if request.node.get_closest_marker("cuda"):
            place.warm()
            shared.pool.replace(cuda=True)
        yield place.path
        gc.collect()  # what a caught exception's frames still hold is no leak
        left = shared.problems(leaves, failed=request.node.stash.get(_FAILED, False))
        assert not left, "\n".join(left)
        return
    made = Runtime()
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(made.path))
    try:
        yield made.path
        gc.collect()
        left = made.leaks((*KEPT, *leaves))
        assert not left, "\n".join(left)
    finally:
        made.remove()


@pytest.fixture
def spawn(request: pytest.FixtureRequest, runtime: Path, shared: Shared) -> Iterator[Callable[..., Child]]:
    """``spawn(fn, *args)``: runs ``fn(peer, *args)`` in a new process (`fn` at the top of its module), or in one of the
    pool."""
    children: list[Child] = []
    pooled, before = shares(request.node, "children"), environment()
    cuda = request.node.get_closest_marker("cuda") is not None

    def start(fn: Callable[..., Any], *args: Any) -> Child:
        if pooled and environment() == before:  # else the test wants something of its children's environment
            children.append(shared.pool.run(fn, args, cuda=cuda))
        else:
            children.append(Child(fn, args))
        return children[-1]

    yield start
    unseen = [error for child in children if (error := child.end()) is not None]
    if unseen:
        raise unseen[0]


@pytest.fixture
def broker(runtime: Path, shared: Shared) -> Iterator[Broker]:
    """A broker that serves `runtime`. It must leave in order, unless the test ended it itself."""
    if shared.place is not None and shared.place.path == runtime:
        yield shared.place.broker
        return
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
