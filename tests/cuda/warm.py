"""Compiles what the tests run on a GPU into CuPy's cache, a process for each type: ``python -m tests.cuda.warm``.

On a fresh machine every test process would compile the same kernels, all at once, and some longer than a test waits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

_TYPES = ("int32", "int64", "uint8", "int8", "float32", "float64")


def _elements(dtype: str) -> None:
    """What the conformance suite computes with (tests/conformance/cases.py), and the smaller uses elsewhere."""
    import cupy

    array = cupy.zeros((4, 8), dtype)
    array[...] = 1
    array[1:, 2:] = 2
    copy = cupy.empty_like(array)
    cupy.copyto(copy, array)
    copy[:, ::2] = array[:, ::2]
    copy += 1
    (copy == array).all().get()
    (array == 1).all().get()
    array.sum().get()
    cupy.arange(8).astype(dtype).get()


def _words() -> None:
    import cupy

    from ipcsync.backends import select

    from . import gpu

    backend = select.backend("cuda")
    stream = backend.new_stream(0, 0)
    gpu.spin(backend, stream, 0)
    array = cupy.zeros(8, cupy.uint64)
    gpu.fill(array, 1)
    array[:] = cupy.arange(8)
    array += 1
    (array == cupy.arange(2, 10, dtype=cupy.uint64)[:, None]).all().get()
    array.sum().get()


def _photos() -> None:
    import cupy

    sys.path.insert(0, "docs/examples/photos")
    import imaging

    edges = imaging.find_edges(cupy.zeros((64, 64, 3), cupy.uint8), cupy)
    cupy.bincount(edges.ravel(), minlength=256).get()


def _torch() -> None:
    """So that its libraries are in the page cache."""
    import torch

    torch.zeros(1, device="cuda").float().sum().item()


PARTS: dict[str, Callable[[], None]] = {"words": _words, "photos": _photos, "torch": _torch}


def main() -> None:
    """Every part in a process of its own, at once; what fails is said, and is no reason to stop."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.cuda.warm"]
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # smaller contexts, of which there are many at once
    running = {part: subprocess.Popen([*command, part], stderr=subprocess.PIPE, env=env) for part in (*_TYPES, *PARTS)}
    for part, process in running.items():
        _, said = process.communicate()
        if process.returncode:
            print(f"{part}: {said.decode().strip().splitlines()[-1:]}")
    print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        part = sys.argv[1]
        PARTS[part]() if part in PARTS else _elements(part)
