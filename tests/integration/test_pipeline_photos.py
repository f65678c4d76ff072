"""The photo pipeline, as README runs it: its pictures are those of the same filter in one process without ipcsync."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ipcsync.trace_summary import load, summarise

from ..harness import files_of
from .pipelines import PATIENCE

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.watchdog(300)
PHOTOS = Path(__file__).parents[2] / "docs" / "examples" / "photos"
COMMAND = [sys.executable, "-c", "from ipcsync.cli import main; main()", "run", str(PHOTOS / "pipeline.toml")]


def overrides(**values: object) -> list[str]:
    keys = {
        "folder": "stages.read.params.folder",
        "write": "stages.write.params.folder",
        "histogram": "stages.histogram.params.folder",
        "device": "pipeline.device",
    }
    return [part for name, value in values.items() for part in ("--set", f"{keys[name]}={value}")]


def run(out: Path, *arguments: str, **values: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *overrides(write=out, histogram=out, **values), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def reference(images: Path, out: Path) -> None:
    subprocess.run([sys.executable, str(PHOTOS / "reference.py"), str(images), str(out)], check=True, timeout=PATIENCE)


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def test_the_pictures_are_those_of_one_process(runtime, tmp_path):
    done = run(tmp_path / "out", "--json", str(tmp_path / "report.json"), device="cpu")
    assert done.returncode == 0, done.stderr
    reference(PHOTOS / "images", tmp_path / "reference")
    expected = pictures(tmp_path / "reference")
    assert len(expected) == 6
    assert pictures(tmp_path / "out") == expected
    assert "passed over SOURCES.md: no image" in done.stderr
    stages = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert {name: stage["items"] for name, stage in stages.items()} == dict.fromkeys(stages, 5)
    assert stages["read"]["counts"] == {"passed over": 1}
    assert "photos: done" in done.stdout
    assert files_of(runtime, ()) == []


@pytest.mark.cuda
def test_a_gpu_makes_the_same_pictures(runtime, tmp_path):
    done = run(tmp_path / "out", device="cuda")
    assert done.returncode == 0, done.stderr
    reference(PHOTOS / "images", tmp_path / "reference")
    assert pictures(tmp_path / "out") == pictures(tmp_path / "reference")


def test_replicas_make_the_same_pictures_and_are_one_stage_in_a_trace(runtime, tmp_path):
    more = ["--set", "stages.edges.replicas=2", "--set", "stages.edges.params.slow=1.5"]
    done = run(tmp_path / "out", "--trace", str(tmp_path / "trace.json"), *more, device="cpu")
    assert done.returncode == 0, done.stderr
    reference(PHOTOS / "images", tmp_path / "reference")
    assert pictures(tmp_path / "out") == pictures(tmp_path / "reference")
    summary = summarise(load(tmp_path / "trace.json"))
    stages = {stage.name: stage for stage in summary.stages}
    assert stages["edges"].processes == 2
    assert stages["write"].input > 0  # who puts the items in order waits for them, and that is seen
    assert summary.bottleneck is stages["edges"]


def test_the_histogram_counts_every_pixel_of_every_picture(runtime, tmp_path):
    assert run(tmp_path / "out", device="cpu").returncode == 0
    with (tmp_path / "out" / "histogram.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    written = [path for path in (tmp_path / "out").glob("*.png") if path.name != "contact-sheet.png"]
    expected = sum(np.bincount(np.asarray(Image.open(path)).ravel(), minlength=256) for path in written)
    assert [int(row["strength"]) for row in rows] == list(range(256))
    assert [int(row["pixels"]) for row in rows] == expected.tolist()


def test_anyones_folder(runtime, tmp_path):
    images = tmp_path / "my pictures"
    images.mkdir()
    ramp = np.linspace(0, 255, 90 * 120).reshape(90, 120).astype(np.uint8)
    grey = Image.fromarray(ramp)
    grey.convert("P").save(images / "palette.gif")
    grey.convert("RGB").save(images / "photo.jpg")
    grey.convert("RGB").save(images / "photo.webp")  # the same stem: both keep their suffix
    grey.convert("RGBA").save(images / "alpha.png")
    Image.fromarray(ramp.astype(np.uint16) * 257).save(images / "sixteen.png")
    grey.convert("1").resize((3, 700)).save(images / "thin.bmp")
    turned = Image.Exif()
    turned[0x0112] = 8
    grey.convert("RGB").save(images / "turned.jpg", exif=turned)
    (images / "notes.txt").write_text("not a picture")
    (images / "empty.png").touch()
    (images / "cut.jpg").write_bytes((images / "photo.jpg").read_bytes()[:700])
    (images / "folder.png").mkdir()
    done = run(tmp_path / "out", folder=images, device="cpu")
    assert done.returncode == 0, done.stderr
    named = set(re.findall(r"passed over (\S+):", done.stderr))
    assert named == {"notes.txt", "empty.png", "cut.jpg"}
    assert "3 passed over" in done.stdout
    reference(images, tmp_path / "reference")
    assert pictures(tmp_path / "out") == pictures(tmp_path / "reference")
    assert sorted(pictures(tmp_path / "out")) == [
        "alpha.png", "contact-sheet.png", "palette.png", "photo.jpg.png", "photo.webp.png", "sixteen.png", "thin.png",
        "turned.png",
    ]  # fmt: skip


def test_an_empty_folder_is_no_failure(runtime, tmp_path):
    (tmp_path / "none").mkdir()
    done = run(tmp_path / "out", folder=tmp_path / "none", device="cpu")
    assert done.returncode == 0, done.stderr
    assert pictures(tmp_path / "out") == {}


def test_a_folder_that_is_not_there_says_what_to_do(runtime, tmp_path):
    done = run(tmp_path / "out", folder=tmp_path / "nowhere", device="cpu")
    assert done.returncode == 1
    assert "stage 'read' failed" in done.stderr
    assert "is no folder: name one with --set stages.read.params.folder=DIR" in done.stderr


def test_on_a_terminal_there_are_bars_and_they_are_gone_at_the_end(runtime, tmp_path):
    ours, theirs = pty.openpty()
    command = [*COMMAND, *overrides(write=tmp_path, histogram=tmp_path, device="cpu")]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how a pseudo-terminal ends
        pass
    os.close(ours)
    assert process.wait(PATIENCE) == 0
    text = shown.decode()
    assert "━" in text  # a bar
    assert re.search(r"items.*running", text)
    assert text.index("running") < text.index("photos: done")
