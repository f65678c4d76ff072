"""The benchmarks still run. No thresholds on time: those belong to a quiet machine and docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipcsync.bench import contest, report
from ipcsync.bench.flows import FLOWS, look
from ipcsync.bench.gpu import on
from ipcsync.bench.trips import TRIPS

from . import python_side

COMMAND = [sys.executable, "-c", "from ipcsync.cli import main; main()", "bench", "--quick"]


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_as_a_person_starts_it(tmp_path: Path) -> None:
    """Every contestant is in the tables, every figure is a number above zero, and what is left out is said."""
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    sections = ["round-trip", "channel", "calls", "pipeline", "import"]
    options = [word for name in sections for word in ("--only", name)]
    done = subprocess.run(
        [*COMMAND, *options, "--json", str(out), "--plot", str(picture)], capture_output=True, text=True, timeout=270
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    tables = {table["key"]: table for table in result["tables"]}
    assert set(tables["round-trip"]["rows"]) == {kind.name for kind in TRIPS}
    for at, readers in ((at, readers) for at in range(3) for readers in (1, 2)):
        assert set(tables[f"channel-{at}-{readers}"]["rows"]) == {kind.name for kind in FLOWS}
    for table in tables.values():
        for name, row in table["rows"].items():
            assert f"| {name} |" in done.stdout
            assert all(value > 0 for value in row.values()), (name, row)
    assert [each["what"] for each in result["not_measured"]] == ["scale", "gpu"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.watchdog(120)
def test_scale(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*COMMAND, "--only", "scale", "--json", str(out)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [each for each in result["not_measured"] if each["why"] != "not asked for"] == []
    assert all("late session ready, ms" in table["rows"] for table in result["tables"])


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, pytest.mark.slow])])
def test_the_part_for_a_gpu(device: str) -> None:
    """On the CPU's streams: what of it needs neither CUDA nor C."""
    missing: list[contest.Missing] = []
    tables = {table.key: table for table in on(device, quick=True, missing=missing)}
    assert device != "cpu" or missing == []
    for key in ("gpu-round-trip", "gpu-hop", "gpu-hand-off", "gpu-stages", f"calls-{device.partition(':')[0]}"):
        assert tables[key].rows, (key, missing)
        assert not tables[key].ours or tables[key].ours in tables[key].rows, missing


def test_the_interpreters_part() -> None:
    found = python_side.measure(batches=1)
    assert len(found) == 6
    assert all(value > 0 for value in found.values())


def test_a_contestant_that_loses_an_item_is_found() -> None:
    """The frames that come across are looked at, not only counted."""
    with pytest.raises(AssertionError, match="item 3 holds"):
        look(np.zeros((4, 4), np.uint8), 3)


class _Failing(contest.Contestant):
    name = "one that fails"
    peers = 0

    def turn(self, case: int, number: int) -> None:
        raise RuntimeError("no such thing here")


class _Dying(contest.Contestant):
    name = "one whose child dies"

    def turn(self, case: int, number: int) -> None: ...

    def answer(self, peer: int, case: int, number: int) -> None:
        raise SystemExit("the child's reason")


class _Fine(contest.Contestant):
    name = "one that works"
    peers = 0

    def turn(self, case: int, number: int) -> None: ...


@pytest.mark.watchdog(60)
def test_who_fails_is_said_and_keeps_nobody_else_from_being_measured(runtime: Path) -> None:
    missing: list[contest.Missing] = []
    found = contest.compete([_Failing(), _Dying(), _Fine()], 2, [(0, 5)], None, missing)
    assert set(found) == {(_Fine.name, 0)}
    assert {each.what: each.why for each in missing}.keys() == {_Failing.name, _Dying.name}
    assert "no such thing here" in missing[0].why
    assert "the child's reason" in missing[1].why


def test_ratios_say_how_much_better_ours_is() -> None:
    def table(**more: Any) -> dict[str, Any]:
        rows = {"ours": {"median": 2.0}, "theirs": {"median": 8.0}}
        return {"ours": "ours", "rows": rows, "more_is_better": False, **more}

    assert report.ratio(table(), "theirs") == 4.0
    assert report.ratio(table(more_is_better=True), "theirs") == 0.25
