"""Planted bugs: each is put into a copy of the library, and the test that is there for it must fail.

A mutant that no test notices is a promise that nobody checks. The text a mutant replaces must be there exactly once, so
that a changed line cannot leave a mutant that is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
#: A bug that shows as a hang is noticed sooner. Without one, the tests pass with these times too.
SHORTER = [
    ("tests/harness.py", "TIMEOUT = 30.0", "TIMEOUT = 10.0"),
    ("ipcsync/session.py", "default_timeout: float | None = 30.0", "default_timeout: float | None = 6.0"),
]


def replace(root: Path, file: str, old: str, new: str) -> None:
    path = root / file
    text = path.read_text()
    assert text.count(old) == 1, f"the mutant's place has changed: {file} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))


def copy(to: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("ipcsync", "broker", "workers", "tests"):
        shutil.copytree(ROOT / folder, to / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", to)
    for change in SHORTER:
        replace(to, *change)


def run(root: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not cuda", *tests]
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'broker'}:{root / 'workers'}"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.watchdog(240)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_planted_bug_is_found(mutant: Mutant, tmp_path: Path) -> None:
    copy(tmp_path)
    replace(tmp_path, mutant.file, mutant.old, mutant.new)
    done = run(tmp_path, *mutant.tests.split(" ", 2))
    crashed = done.returncode < 0  # memory let go under a stream's hands
    failed = done.returncode == pytest.ExitCode.TESTS_FAILED and " failed" in done.stdout
    assert crashed or failed, f"nobody noticed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    assert "error during collection" not in done.stdout
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.watchdog(240)
def test_the_same_tests_pass_without_them(tmp_path: Path) -> None:
    """All of them, in one run."""
    copy(tmp_path)
    files = sorted({mutant.tests.split(" ")[0] for mutant in MUTANTS})
    wanted = " or ".join(sorted({mutant.tests.split(" ")[2] for mutant in MUTANTS}))
    done = run(tmp_path, *files, "-k", wanted)
    assert done.returncode == pytest.ExitCode.OK, f"{done.stdout[-3000:]}{done.stderr[-2000:]}"
