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
from collections.abc import Iterable, Iterator

import pytest

UNTIL = float(os.environ.get("IPCSYNC_TEST_UNTIL", "inf"))  # time.time() after which nothing begins
LOG = os.environ.get("IPCSYNC_TEST_LOG")
HANGS = open(f"{LOG}.hangs", "a") if LOG else None  # noqa: SIM115  (what began, and where it was when it was ended)
SERVERS = os.environ.get("IPCSYNC_TEST_MPS", "")  # the pipe directories of MPS servers, one for each xdist worker
_KILLS = re.compile(r"\.kill\b")
_ORDER = (
    "test_shared_events",
    "test_channels",
    "test_arrays",
    "test_two_gpus",
    "test_limits",
    "test_interop",
    "test_budget",
    "test_event_processes",
    "test_event",
    "test_many",
    "test_pipeline_photos",
    "test_sessions",
    "test_kills",
    "test_torch",
    "test_words",
    "test_events",
    "test_memory",
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


def _rank(item: pytest.Item) -> tuple[bool, int]:
    """Those that take long begin first, so that none is still running when all others have ended."""
    name = item.path.stem
    return item.get_closest_marker("slow") is None, _ORDER.index(name) if name in _ORDER else len(_ORDER)


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
    if LOG is None or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    lines: Iterable[str] = [f"{report.outcome} {report.when} {report.duration:.1f} {report.nodeid}"]
    if report.failed:
        lines = [*lines, report.longreprtext, *(f"[{title}]\n{text}" for title, text in report.sections)]
    with open(LOG, "a") as log:
        log.write("\n".join(lines) + "\n")
