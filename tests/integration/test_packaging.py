"""The wheel and the sdist are whole, and what was installed from the wheel alone works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, distribution, entry_points
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def requirements(name: str, found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """What a plain ``pip install`` of it brings: its requirements and theirs, without extras."""
    found = {} if found is None else found
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        key = canonicalize_name(requirement.name)
        if key not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[key] = distribution(requirement.name)
            requirements(requirement.name, found)
    return found


@pytest.fixture
def clean(built: Path, tmp_path: Path) -> Path:
    """A new environment with the wheel, and what it declares that it needs, and nothing else. Its programs' folder."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    for package in requirements("ipcsync").values():
        for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(package.locate_file(top))
    python = programs / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel_of(built))
    return programs


def test_it_works_in_a_clean_environment(clean: Path, runtime: Path, tmp_path: Path) -> None:
    said = run(clean / "python", "-c", USE.format(site=str(tmp_path / "venv")), cwd=tmp_path)
    assert said == "round 1 is complete\n"
    assert ipcsync.__version__ in run(clean / "ipcsync", "--version", cwd=tmp_path)
    missing = run(clean / "python", "-c", "from importlib.util import find_spec as f; print(f('cupy'), f('pytest'))")
    assert missing == "None None\n"


def test_doctor_runs_where_nothing_else_is(clean: Path, runtime: Path, tmp_path: Path) -> None:
    """What ``pipx run ipcsync doctor`` does."""
    done = subprocess.run([clean / "ipcsync", "doctor", "--json"], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert {"ok", "warning", "fails"} >= {finding["status"] for finding in json.loads(done.stdout)["findings"]}


def test_a_users_checker_sees_our_types(clean: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(
        "import ipcsync\nipcsync.connect(timeout='soon')\nreveal_type(ipcsync.Event().query())\n"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", clean / "python", "user.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout
    assert 'incompatible type "str"' in said
    assert 'Revealed type is "bool"' in said or 'Revealed type is "builtins.bool"' in said


def test_completion_knows_every_command() -> None:
    program = Path(sys.executable).parent / "ipcsync"
    env = {**os.environ, "_IPCSYNC_COMPLETE": "bash_complete", "COMP_WORDS": "ipcsync ", "COMP_CWORD": "1"}
    offered = {line.partition(",")[2] for line in run(program, env=env).split()}
    assert offered == {entry.name for entry in entry_points(group="ipcsync.commands")}


def test_what_is_run_before_a_commit_is_there() -> None:
    pytest.importorskip("pre_commit")
    config = ROOT / ".pre-commit-config.yaml"
    run(sys.executable, "-m", "pre_commit", "validate-config", config)
    hooks = [hook for repo in yaml.safe_load(config.read_text())["repos"] for hook in repo["hooks"]]
    assert hooks
    for hook in hooks:
        assert (Path(sys.executable).parent / hook["entry"].split()[0]).exists(), hook
