"""Named places where a test can have the process die, stop or stumble: ``IPCSYNC_FAILPOINTS="condemn.verdict=kill"``.

Armed by environment only, so that a real process is killed at a real instruction and no test reaches inside it. When
nothing is armed ``ARMED`` is empty, and a failpoint on the hot path costs the one test of that.

The value is ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise`` (a RuntimeError) or ``pause:SECONDS``; ``@N`` behind it
means the Nth time the place is passed, counted from 1. Several are separated by commas.
"""

from __future__ import annotations

import os
import signal
import time

#: Every name there is; arming another is an error, so that a renamed place cannot leave a test that tests nothing.
NAMES = frozenset(
    {
        "broker.before-export",
        "broker.after-export",
        "broker.publish",
        "broker.attach",
        "broker.takeover",
        "journal.write",
        "condemn.verdict",
        "condemn.release",
        "record.intent",
        "record.written",
        "wait.announced",
        "slot.publish",
        "slot.taken",
        "slot.release",
        "supervisor.channels",
        "supervisor.started",
        "supervisor.restart",
        "supervisor.end",
    }
)


def parse(text: str) -> dict[str, tuple[str, int]]:
    """``name=action[@N],...`` -> {name: (action, N)}."""
    armed = {}
    for part in filter(None, text.split(",")):
        name, _, action = part.partition("=")
        action, _, nth = action.partition("@")
        if name not in NAMES or action.partition(":")[0] not in ("kill", "stop", "raise", "pause"):
            raise ValueError(f"IPCSYNC_FAILPOINTS: {part!r} is none of {sorted(NAMES)} = kill|stop|raise|pause:SECONDS")
        armed[name] = (action, int(nth or 1))
    return armed


ARMED = parse(os.environ.get("IPCSYNC_FAILPOINTS", ""))
_passed: dict[str, int] = {}


def hit(name: str) -> None:
    """Does what is armed for `name`. Call it as ``if ARMED: hit("...")``."""
    if name not in ARMED:
        return
    action, nth = ARMED[name]
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise RuntimeError(f"failpoint {name}")
    else:
        time.sleep(float(action.partition(":")[2]))
