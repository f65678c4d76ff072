"""The wheel and the sdist are whole, and what was installed from the wheel alone works."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ipcsync

from .pages import ROOT

pytest.importorskip("build")

USE = """
import ipcsync, ipcsync_broker, ipcsync_workers
for package in (ipcsync, ipcsync_broker, ipcsync_workers):
    assert package.__file__.startswith({site!r}), package.__file__
with ipcsync.connect(start_broker=True) as session:
    event = session.create_event("frame", device="cpu")
    event.synchronize(round=event.record(), timeout=10.0)
    print("round", event.completed, "is complete")
"""


def run(*command: str | Path, **more: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


def wheel_of(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_the_wheel_has_three_packages_and_all_their_files(built: Path) -> None:
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        names = wheel.namelist()
    info = f"ipcsync-{ipcsync.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ipcsync", "ipcsync_broker", "ipcsync_workers", info}
    assert f"{info}/licenses/LICENSE" in names
    folders = (ROOT / "ipcsync", ROOT / "broker" / "ipcsync_broker", ROOT / "workers" / "ipcsync_workers")
    tracked = run("git", "-c", "safe.directory=*", "ls-files", *folders, cwd=ROOT).split()
    assert {name.removeprefix("broker/").removeprefix("workers/") for name in tracked} <= set(names)
    assert {f"{folder.name}/py.typed" for folder in folders} <= set(names)


def test_the_sdist_can_be_built_and_tested_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "docs/conf.py"} <= names


def test_the_checkers_are_content(built: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())
    tops = "ipcsync,ipcsync_broker,ipcsync_workers"
    run(Path(sys.executable).parent / "check-wheel-contents", "--toplevel", tops, wheel_of(built), cwd=built)


def test_what_was_installed_works(built: Path, runtime: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel_of(built))
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    said = run(sys.executable, "-c", USE.format(site=str(site)), cwd=tmp_path, env=env)
    assert said == "round 1 is complete\n"
    said = run(sys.executable, site / "bin" / "ipcsync", "--version", cwd=tmp_path, env=env)
    assert ipcsync.__version__ in said
