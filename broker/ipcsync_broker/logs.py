"""The broker's log: the standard library's logging, as text or as JSON lines, on stderr.

What changes is said once, when it changes. The same message again and again is let through five times in ten seconds;
how many were not is said when it comes once more after that.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

LOG = logging.getLogger("ipcsync.broker")
BURST, WINDOW = 5, 10.0
_KEPT = 1024  # different messages remembered


class RateLimit(logging.Filter):
    """Lets the same message through BURST times in WINDOW seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # when it began, how often it came

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.getMessage()
        began, count = self._seen.get(key, (record.created, 0))
        if record.created - began > WINDOW:
            if count > BURST:
                record.msg = f"{key} (and {count - BURST} more of these before)"
                record.args = ()
            began, count = record.created, 0
        if len(self._seen) >= _KEPT:
            self._seen.clear()
        self._seen[key] = began, count + 1
        return count < BURST


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (seconds since 1970), ``level``, ``message``, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def setup(format: str = "text", level: str = "info") -> None:
    """Logs to stderr; replaces what an earlier call set up."""
    handler = logging.StreamHandler()
    handler.addFilter(RateLimit())
    text = logging.Formatter("%(asctime)s ipcsync broker: %(levelname)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    text.converter = time.gmtime
    handler.setFormatter(JsonLines() if format == "json" else text)
    LOG.handlers[:] = [handler]
    LOG.propagate = False
    LOG.setLevel(level.upper())


def announced(namespace: str, kind: str, body: Mapping[str, Any]) -> None:
    """A change of state that everybody is told of, for the log; ticks are none."""
    if kind == "tick":
        return
    name = body.get("name", "")
    plain = {key: told for key, told in body.items() if isinstance(told, str | int | float)}
    fields = {"event": kind, "namespace": namespace, **plain}
    if kind == "session":
        state = body.get("state", "")
        level = logging.WARNING if state in ("died", "silent") else logging.INFO
        LOG.log(level, "session %r (pid %s): %s", name, body.get("pid"), state, extra={"fields": fields})
    elif kind == "condemned":
        LOG.warning("condemned: %s", name or body, extra={"fields": fields})
    elif kind == "stopping":
        LOG.info("stopping", extra={"fields": fields})
    else:
        LOG.debug("%s: %s", kind, name, extra={"fields": fields})
