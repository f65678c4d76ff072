"""``ipcsync doctor``, as a command, on whatever machine this is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipcsync import doctor, doctor_host
from ipcsync.doctor_probe import FAILS, OK, WARNING, Finding, probe

NO_GPU = not os.path.exists("/dev/nvidiactl")


def _doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ipcsync.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.watchdog(150)
def test_it_looks_at_everything_and_says_so(runtime: Path) -> None:
    ended = _doctor("--json")
    said = json.loads(ended.stdout)
    lines = {line["name"]: line for line in said["findings"]}
    assert all(line["status"] in (OK, WARNING, FAILS) for line in lines.values())
    assert all(line["text"] for line in lines.values())
    assert all(line["advice"] for line in lines.values() if line["status"] == FAILS)
    for name in ("whole words", "store and load", "futex", "robust mutex", "runtime directory"):
        assert lines[name]["status"] != FAILS, lines[name]
    assert str(runtime) in lines["runtime directory"]["text"]
    if NO_GPU:
        assert lines["cuda"]["status"] == WARNING
        assert "no CUDA device was found" in lines["cuda"]["text"]
    assert ended.returncode == (FAILS in {line["status"] for line in lines.values()})
    assert not list(Path("/dev/shm").glob("ipcsync-doctor-*"))


@pytest.mark.watchdog(150)
def test_a_directory_that_cannot_be_used_fails(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.chmod(0o755)
    ended = _doctor()
    assert ended.returncode == 1
    assert "fails" in ended.stdout
    assert "chmod 700" in ended.stdout
    runtime.chmod(0o700)


def test_a_probe_that_breaks_off_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = probe("thing", "litmus.no_such_probe")
    assert (broken.name, broken.status) == ("thing", FAILS)
    assert "no_such_probe" in broken.text
    hung = probe("thing", "litmus.futex", timeout=0.01)
    assert hung.status == FAILS
    assert "did not end" in hung.text
    assert "ipcsync.doctor_probe" in hung.advice


def test_small_tmpfs_namespaces_and_limits() -> None:
    def space(total: int, free: int) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, total // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))

    assert doctor_host.tmpfs("/dev/shm", space(1 << 36, 1 << 35)).status == OK
    docker = doctor_host.tmpfs("/dev/shm", space(64 << 20, 60 << 20))
    assert docker.status == WARNING
    assert "--shm-size" in docker.advice
    assert doctor_host.tmpfs("/dev/shm", space(1 << 36, 4096)).status == FAILS
    assert doctor_host.tmpfs("/dev/shm", None).status == FAILS
    assert doctor_host.namespace("pid namespace", 0xEFFFFFFC, 0xEFFFFFFC, "--pid").status == OK
    other = doctor_host.namespace("pid namespace", 4026532000, 0xEFFFFFFC, "--pid=container:NAME")
    assert other.status == WARNING
    assert "--pid=container:NAME" in other.advice
    assert doctor_host.limits(256).status == WARNING
    assert doctor_host.limits(65536).status == OK


def test_what_stands_in_brackets_is_said() -> None:
    """pip install "ipcsync[cuda13]": no markup of the table's."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        doctor._show([Finding("cuda", WARNING, 'pip install "ipcsync[cuda13]"', "or [cuda12]")])
    assert "ipcsync[cuda13]" in said.getvalue()
    assert "or [cuda12]" in said.getvalue()
