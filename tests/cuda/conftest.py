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
    return gpu.here()


@pytest.fixture
def region(backend: CudaBackend, runtime: Path) -> Iterator[Region]:
    with gpu.words(backend, runtime) as made:
        yield made
