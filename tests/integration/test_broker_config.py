"""The broker by file, environment and option, the later over the earlier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ipcsync import ask, config
from ipcsync_broker.cli import broker as command

from ..harness import Broker


def quotas(runtime: Path) -> tuple[int, int, int]:
    with ask.Asker(runtime) as asker:
        told = asker.status()["quotas"]
    return told["sessions"], told["channels"], told["session_events"]


def test_the_later_source_wins(runtime: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[broker]\nmax_sessions = 5\nmax_channels = 6\nmax_session_events = 7\n")
    env = {"IPCSYNC_CONFIG": str(path), "IPCSYNC_BROKER_MAX_CHANNELS": "60", "IPCSYNC_BROKER_MAX_SESSION_EVENTS": "70"}
    broker = Broker(runtime, "--max-session-events", "700", env=env)
    try:
        assert quotas(runtime) == (5, 60, 700)
    finally:
        assert broker.stop() == 0


@pytest.mark.parametrize(
    ("content", "says"), [("[broker]\nhtpp = 'x'", "did you mean 'broker.http'?"), ("[", "no TOML")]
)
def test_a_mistake_in_the_file_is_said_in_a_sentence(runtime: Path, tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "ipcsync_broker"],
        env={"IPCSYNC_CONFIG": str(path), "IPCSYNC_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_every_setting_of_the_broker_is_an_option_of_it() -> None:
    options = {parameter.name for parameter in command.params}
    ours = {key.removeprefix("broker.") for key in config.settings() if key.startswith("broker.")}
    assert ours <= options
    assert options - ours == {"detach", "stopping", "runtime_dir", "ready_fd"}
