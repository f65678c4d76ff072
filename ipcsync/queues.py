"""How many hardware queues a process asks CUDA for, which is read once, as CUDA starts in it.

A stream that waits for another process holds one (docs/decisions/0017), so a process that waits wants as many as there
are: 32. The clients of one MPS server share what the server has, and CUDA gives each 2 unless it asks.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
ALONE, SHARED = "32", "8"


def under_mps(environment: MutableMapping[str, str]) -> bool:
    """Whether a process that is started with it becomes a client of an MPS daemon."""
    pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return os.path.exists(os.path.join(pipes, "nvidia-cuda-mps-control.pid"))


def ask(environment: MutableMapping[str, str]) -> None:
    """Sets :data:`VARIABLE`, unless it is set."""
    if VARIABLE not in environment:
        environment[VARIABLE] = SHARED if under_mps(environment) else ALONE
