"""The backend of these tests; without a GPU they are skipped (or fail, with IPCSYNC_REQUIRE_CUDA=1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcsync.backends.cuda import CudaBackend
from ipcsync.shm import Region

from . import gpu


@pytest.fixture(scope="session")
def backend() -> CudaBackend:
    made = gpu.here()
    # A test that launches behind a stream it holds must not be the first to: loading a kernel waits for every stream.
    gpu.spin(made, made.new_stream(0, 0), 0)
    return made


@pytest.fixture
def region(backend: CudaBackend, runtime: Path) -> Iterator[Region]:
    with gpu.words(backend, runtime) as made:
        yield made
