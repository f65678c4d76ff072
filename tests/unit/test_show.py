"""What the terminal shows of an overview."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ipcsync import show
from ipcsync.overview import rates

from .overview_sample import sample, session


def printed(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(what)
    return out.getvalue()


def test_everything_there_is_is_shown() -> None:
    text = printed(show.everything(sample()))
    for part in (
        "broker 100, version 0.1.0",
        "2 sessions",
        "deaths: 2",
        "read",
        "frames",
        "weights",
        "3/4",
        "edges (1 held, 2 behind)",
    ):
        assert part in text
    assert "1 behind, 3 skipped" in text


def test_rates_are_of_what_completed_in_between() -> None:
    before, now = sample(), sample()
    now["channels"][0]["completed"] += 30
    assert rates(None, now, 1.0) == {}
    found = rates(before, now, 2.0)
    assert found[2] == 15.0
    assert "15.0" in printed(show.channels(now, found))


def test_what_is_not_well_is_said() -> None:
    seen = sample()
    seen["sessions"] = [session(1, "read", process="stopped")]
    seen["events"][0]["verdict"] = 6
    text = printed(show.everything(seen))
    assert "live, stopped" in text
    assert "condemned from 6" in text


def test_sizes_and_spans() -> None:
    assert [show.size(n) for n in (0, 1536, 3 << 30)] == ["0 B", "1.5 KiB", "3.0 GiB"]
    assert [show.span(s) for s in (3, 600, 90000)] == ["3 s", "10 min", "25 h"]
    assert show.bar(0.25, 8) == "██······"
