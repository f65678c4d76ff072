"""All code in README and docs runs, each page in a folder and a runtime directory of its own."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipcsync
from ipcsync import config, errors
from ipcsync_workers import schema

from ..harness import Broker
from .pages import ROOT, Page, Step, pages

PAGES = {page.name: page for page in pages()}
SHOWN = [
    pytest.param(page, device, id=f"{page.name}-{device}", marks=pytest.mark.cuda if device == "cuda" else ())
    for page in PAGES.values()
    for device in page.devices()
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a page's programs run; the repository's examples are there, as in a clone."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "examples").symlink_to(ROOT / "docs" / "examples")
    return tmp_path


@pytest.fixture
def page_broker(page: Page, runtime: Path) -> Iterator[None]:
    broker = Broker(runtime) if "broker" in page.says else None
    yield
    if broker is not None:
        assert broker.stop() == 0, broker.log()


@pytest.mark.watchdog(300)
@pytest.mark.parametrize(("page", "device"), SHOWN)
def test_page(page: Page, device: str, folder: Path, page_broker: None) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    if device == "host":
        env["CUDA_VISIBLE_DEVICES"] = ""
    steps = page.steps(device)
    if not steps:
        pytest.skip("what it needs is not installed")
    for step in steps:
        if step.file:
            path = folder / step.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.code)
        else:
            _run(page, step, folder, env)


def _run(page: Page, step: Step, folder: Path, env: dict[str, str]) -> None:
    where = f"{page.name}:{step.line}"
    if step.language == "python":
        program = folder / f"line_{step.line}.py"  # a file, so that multiprocessing's spawn can import it again
        program.write_text(step.code)
        command = [sys.executable, "-W", "error", program.name]
    else:
        command = ["bash", "-euo", "pipefail", "-c", step.code]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{where} ended with status {done.returncode}\n{done.stdout}\n{done.stderr}"
    printed = iter(done.stdout.splitlines())
    for line in step.output:
        assert any(line.strip() in said for said in printed), f"{where} did not print {line!r}:\n{done.stdout}"


def test_every_directive_is_one_that_we_know() -> None:
    """A misspelt one would leave code untested."""
    known = {"continues", "file", "run", "output", "cuda", "needs", "not run", "run-the-example", "run-the-tests"}
    for page in PAGES.values():
        assert set(page.says) <= {"broker", "on"}, page.name
        for block in page.blocks:
            assert set(block.says) <= known, f"{page.name}:{block.line}"


def test_no_code_is_forgotten() -> None:
    """Every fence of every page is a block that we know, and a block is run unless it says why not."""
    tracked = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.rst"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {name for name in tracked if not name.startswith("docs/examples/")} - set(PAGES) == {"CHANGELOG.md"}
    for page in PAGES.values():
        fences = re.findall(r"^\s*(?:```|~~~)", page.path.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(page.blocks), f"{page.name}: a fence that is indented, or not closed"
        for block in page.blocks:
            if block.language in ("", "text") or block.language.startswith("{"):
                continue
            run = {"file", "run", "run-the-example", "run-the-tests", "not run"}
            assert block.language == "python" or run & set(block.says), f"{page.name}:{block.line} is not run"
        assert not re.search(r"^ *>>>|^\.\. code", page.path.read_text(), re.MULTILINE), page.name


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "environment.md").read_text()
    said = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert said == [(setting.key, setting.variable) for setting in config.settings().values()]


def test_every_key_of_a_pipeline_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "pipeline-file.md").read_text()
    said = {
        section.split("]`")[0].strip("[`"): re.findall(
            r"`([a-z_]+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.M))
        )
        for section in text.split("\n## ")[1:]
    }
    for table, struct in (
        ("pipeline", schema.Settings),
        ("channels.NAME", schema.ChannelPlan),
        ("stages.NAME", schema.StagePlan),
    ):
        assert said[table] == list(struct.__struct_fields__), table


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    for name in set(ipcsync.__all__) - set(errors.__all__) - {"__version__", "Slot"}:  # a slot is one of its two kinds
        assert f":: ipcsync.{name}\n" in text, name


def test_every_name_in_the_reference_has_an_example() -> None:
    page = PAGES["docs/reference/api.md"]
    code = "\n".join(block.code for block in page.blocks if block.language == "python")
    made = {"Session", "SharedEvent", "Channel", "Writer", "WriteSlot", "Reader", "ReadSlot"}  # that calls give
    made |= {"SharedArray", "View", "Watch", "Item"}
    listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)\n(?: +:members: (.*)\n)?", page.path.read_text(), re.MULTILINE)
    assert len(listed) == page.path.read_text().count(".. auto")
    for what, members in listed:
        for name in {what.rpartition(".")[2], *filter(None, members.split(", "))} - made:
            assert re.search(rf"\b{name}\b", code), f"{what}: {name}"
        if not what.startswith("ipcsync.torch"):
            described = pkgutil.resolve_name(".".join(what.rsplit(".", 1)))
            for name in filter(None, members.split(", ")):
                assert inspect.getdoc(getattr(described, name)), f"{what}.{name} says nothing"


def test_tests_that_are_named_exist() -> None:
    """Pages that say which test proves what."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
            assert (ROOT / file).exists(), f"{page}: {file}"
            assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{page}: {file}::{name}"


@pytest.mark.parametrize(
    "page", sorted((*(ROOT / "docs" / "design").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md"),
                    ROOT / "docs" / "protocol.md", ROOT / "CONTRIBUTING.md")), ids=lambda page: page.name
)  # fmt: skip
def test_code_that_is_named_exists(page: Path) -> None:
    """Files, by their path or the end of it: `ledger.py`, `backends/base.py`."""
    folders = [ROOT / folder for folder in ("ipcsync", "broker", "workers", "tests", "docs")]
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        assert (ROOT / name).exists() or any(any(folder.rglob(name)) for folder in folders), name


def test_every_sentence_of_torchs_page_names_a_test() -> None:
    text = (ROOT / "docs" / "reference" / "torch-event.md").read_text()
    table = text.partition("## Each documented sentence")[2]
    rows = re.findall(r"^\| (?!torch says|it says)(.*) \|$", table, re.MULTILINE)
    assert len(rows) > 30
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", row), row


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    """Links between files, anchors too (those inside docs/ are Sphinx's to check)."""
    text = (ROOT / name).read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        assert (ROOT / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / (target or name)).read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{target}#{anchor}"
