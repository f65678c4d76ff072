"""The benchmarks still run. No thresholds on time: those belong to a quiet machine and docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .flows import look

ROOT = Path(__file__).parents[2]


@pytest.mark.watchdog(180)
def test_host_benchmarks_run(tmp_path: Path) -> None:
    """As a person would start them; every contestant is in the tables, and every figure is a number above zero."""
    command = [sys.executable, "-m", "tests.benchmarks.host", "--quick", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["items"]) == 3
    for table in (result["round_trip"], *result["items"].values()):
        assert len(table) >= 4
        for name, row in table.items():
            assert f"| {name} |" in done.stdout
            assert all(value > 0 for value in row.values()), (name, row)


def test_a_contestant_that_loses_an_item_is_found() -> None:
    """The frames that come across are looked at, not only counted."""
    with pytest.raises(AssertionError, match="item 3 holds"):
        look(np.zeros((4, 4), np.uint8), 3)
