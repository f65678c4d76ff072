"""How many hardware queues a process asks CUDA for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipcsync import queues


@pytest.mark.parametrize("daemon", [False, True])
def test_a_client_of_an_mps_server_asks_for_fewer(tmp_path: Path, daemon: bool) -> None:
    if daemon:
        (tmp_path / "nvidia-cuda-mps-control.pid").write_text("1")
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    queues.ask(environment)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == ("8" if daemon else "32")


def test_what_is_set_already_stays() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "3"}
    queues.ask(environment)
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "3"}
