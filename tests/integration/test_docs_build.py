"""The documentation builds, without a warning."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from .pages import ROOT

pytest.importorskip("sphinx")


@pytest.mark.watchdog(300)
def test_build(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", tmp_path / "html"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()
    commands = (tmp_path / "html" / "reference" / "cli.html").read_text()
    for entry in entry_points(group="ipcsync.commands"):
        assert f'id="ipcsync-{entry.name}"' in commands, entry.name
