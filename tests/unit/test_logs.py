"""The broker's log: text and JSON lines, states once, repeats seldom."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from ipcsync_broker import logs


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    logs.LOG.handlers.clear()
    logs.LOG.propagate = True


def test_json_lines_have_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("json", "info")
    logs.announced("default", "session", {"session": 3, "name": "read", "pid": 7, "state": "died"})
    logs.announced("default", "created", {"name": "frame"})  # debug
    logs.announced("", "tick", {})
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["level"] == "warning"
    assert told["message"] == "session 'read' (pid 7): died"
    assert (told["event"], told["session"], told["state"]) == ("session", 3, "died")


def test_an_exception_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("json")
    try:
        raise ValueError("why")
    except ValueError:
        logs.LOG.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: why" in json.loads(line)["traceback"]


def test_text_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("text", "warning")
    logs.LOG.info("not said")
    logs.LOG.warning("said")
    said = capsys.readouterr().err
    assert said.endswith("ipcsync broker: WARNING: said\n")
    assert "not said" not in said


def record(message: str, at: float) -> logging.LogRecord:
    made = logging.LogRecord("ipcsync.broker", logging.WARNING, "", 0, message, (), None)
    made.created = at
    return made


def test_repeats_are_let_through_seldom_and_counted() -> None:
    limit = logs.RateLimit()
    assert [limit.filter(record("bad", i / 10)) for i in range(8)] == [True] * 5 + [False] * 3
    assert limit.filter(record("other", 1.0))
    later = record("bad", 20.0)
    assert limit.filter(later)
    assert later.getMessage() == "bad (and 3 more of these before)"
    again = record("bad", 40.0)
    assert limit.filter(again)
    assert again.getMessage() == "bad"
