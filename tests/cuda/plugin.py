"""A pytest plugin for short runs on a GPU (``-p tests.cuda.plugin``; ``tests/cuda/verify.py`` uses it).

What has shown least comes first, nothing begins after the time is up, and each result is in a log as soon as it is
there. Tests that kill or fault a process which may be at the GPU are marked ``kills``: under MPS they take the other
clients of their server along, so ``verify.py`` runs each of them with a server of its own.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

UNTIL = float(os.environ.get("IPCSYNC_TEST_UNTIL", "inf"))  # time.time() after which nothing begins
LOG = os.environ.get("IPCSYNC_TEST_LOG")
HANGS = open(f"{LOG}.hangs", "a") if LOG else None  # noqa: SIM115  (what began, and where it was when it was ended)
SERVERS = os.environ.get("IPCSYNC_TEST_MPS", "")  # the pipe directories of MPS servers, one for each xdist worker
PHASES: dict[str, float] = defaultdict(float)  # seconds
_setups: dict[str, float] = {}
_KILLS = re.compile(r"\.kill\b")
#: What shows most for its time comes first, and what kills again and again (tests/faults) last.
_ORDER = (
    "conformance/test_shared_events",
    "conformance/test_channels",
    "conformance/test_channel_ends",
    "conformance/test_channel_readers",
    "conformance/test_channel_streams",
    "conformance/test_arrays",
    "conformance/test_event",
    "conformance/test_event_processes",
    "conformance/test_many",
    "cuda/test_two_gpus",
    "cuda/test_sessions",
    "cuda/test_interop",
    "cuda/test_words",
    "cuda/test_events",
    "cuda/test_memory",
    "cuda/test_trace",
    "cuda/test_budget",
    "cuda/test_limits",
    "integration/test_pipeline_photos",
    "integration/test_torch",
    "integration/test_docs",
)

if SERVERS:  # before anything starts CUDA here
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    servers = SERVERS.split(":")
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = servers[int(worker.removeprefix("gw")) % len(servers)]


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _kills(item):
            item.add_marker("kills")
    items.sort(key=_rank)


def _kills(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    if item.path.parent.name == "faults":
        return True
    return function is not None and _KILLS.search(inspect.getsource(function)) is not None


def _rank(item: pytest.Item) -> int:
    name = f"{item.path.parent.name}/{item.path.stem}"
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL:
        pytest.skip("not run: the time was up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Inside of the watchdog of tests/conftest.py, and less patient: a test that hangs in the driver, which no signal
    ends, ends its worker, and xdist starts another."""
    if HANGS is not None:
        marker = item.get_closest_marker("watchdog")
        faulthandler.dump_traceback_later((marker.args[0] if marker else 60) + 10, exit=True, file=HANGS)
        HANGS.write(f"{os.getpid()} {item.nodeid}\n")
        HANGS.flush()
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line a test; what failed, whole. In the process that sees all of them."""
    if LOG is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    PHASES[report.when or ""] += report.duration
    if report.when == "setup":
        _setups[report.nodeid] = report.duration
    if report.when == "call":
        lines = [f"{report.outcome} call {report.duration:.1f} setup {_setups[report.nodeid]:.1f} {report.nodeid}"]
    elif report.outcome != "passed":
        lines = [f"{report.outcome} {report.when} {report.duration:.1f} {report.nodeid}"]
    elif report.when == "teardown" and report.duration >= 1:
        lines = [f"slow teardown {report.duration:.1f} {report.nodeid}"]
    else:
        return
    if report.failed:
        lines = [*lines, report.longreprtext, *(f"[{title}]\n{text}" for title, text in report.sections)]
    _write("\n".join(lines))


def pytest_sessionfinish() -> None:
    if LOG is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        _write("seconds, of all workers: " + ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in PHASES.items()))


def _write(text: str) -> None:
    if LOG is not None:
        with open(LOG, "a") as log:
            log.write(text + "\n")


def pytest_unconfigure() -> None:
    if HANGS is not None:
        faulthandler.cancel_dump_traceback_later()
        HANGS.close()
