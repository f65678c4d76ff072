"""Device spans of a trace, by CUDA's own clock."""

from __future__ import annotations

from pathlib import Path

import pytest

import ipcsync
from ipcsync import trace
from ipcsync.backends.cuda import CudaBackend

from ..unit.test_trace import check_format
from . import gpu

pytestmark = pytest.mark.cuda


def test_device_work_is_timed_by_the_device(backend: CudaBackend, tmp_path: Path) -> None:
    stream = ipcsync.Stream("cuda:0")
    raw = stream.__cuda_stream__()[1]
    gpu.spin(backend, raw, 0)  # the kernel is compiled before anything is timed
    backend.stream_synchronize(raw)
    with trace.Trace(tmp_path / "out.json", "gpu"):
        recorder = trace.ACTIVE
        assert recorder is not None
        for name in ("first", "second"):
            with recorder.gpu(name, stream):
                gpu.spin(backend, raw, 20)
    spans = [e for e in check_format(tmp_path / "out.json") if e.get("cat") == "gpu"]
    first, second = sorted(spans, key=lambda e: e["ts"])
    assert (first["name"], second["name"]) == ("first", "second")
    assert first["dur"] > 10_000
    assert second["ts"] >= first["ts"] + first["dur"] - 100
