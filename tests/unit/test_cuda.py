"""The cuda backend's pure parts: what errors mean, devices by UUID, quarantine. And a machine without a GPU."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipcsync import errors
from ipcsync.backends import cuda_driver, cuda_memory, cuda_probe
from ipcsync.backends.cuda import CudaBackend
from ipcsync.backends.cuda_events import CudaEvent
from ipcsync.backends.cuda_pending import Passed, Pending
from ipcsync.backends.cuda_streams import DefaultStream, KeptStream, key
from ipcsync.backends.cuda_teardown import Quarantine
from ipcsync.session import Session
from ipcsync.shm import Region
from ipcsync.waiting import Deadline

from ..harness import Gate, wait_until

NO_GPU = not os.path.exists("/dev/nvidiactl")


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (700, errors.DeviceLost, "start it again"),
        (719, errors.DeviceLost, "start it again"),
        (810, errors.DeviceLost, "MPS"),
        (2, errors.OutOfSpace, "let some go"),
        (3, errors.DeviceUnavailable, "ipcsync doctor"),
        (46, errors.DeviceUnavailable, "exclusive"),
        (100, errors.DeviceUnavailable, "ipcsync doctor"),
        (803, errors.DeviceUnavailable, "do not match"),
        (801, errors.Unsupported, "MIG"),
        (900, errors.CaptureUnsupported, "captured"),
        (906, errors.CaptureUnsupported, "captured"),
        (712, errors.CudaError, "cuThing"),
        (123456, errors.CudaError, "123456"),
    ],
)
def test_a_status_becomes_a_sentence(status: int, kind: type[errors.IpcSyncError], says: str) -> None:
    error = cuda_driver.cuda_error(status, "cuThing")
    assert type(error) is kind
    assert says in str(error)
    assert error.status == status
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.call) == (kind, str(error), "cuThing")


def test_a_forked_child_is_told_to_spawn() -> None:
    error = cuda_driver.cuda_error(3, "cuCtxPushCurrent", forked=True)
    assert isinstance(error, errors.ForkedProcess)
    assert "spawn" in str(error)


def test_devices_are_found_by_uuid_not_by_a_peers_ordinal() -> None:
    assert cuda_driver.find_uuid("GPU-b", ["GPU-a", "GPU-b"]) == 1
    with pytest.raises(errors.DeviceNotVisible, match="CUDA_VISIBLE_DEVICES") as found:
        cuda_driver.find_uuid("GPU-c", ["GPU-a"])
    assert found.value.uuid == "GPU-c"


@given(st.permutations(range(16)), st.integers(0, 16))
def test_any_number_of_devices_in_any_order_are_mapped_by_uuid(order: list[int], count: int) -> None:
    """Whatever part of a machine's GPUs a process sees, and in which order: the same GPU, or none."""
    visible = [f"GPU-{n:02}" for n in order[:count]]
    for n in range(16):
        name = f"GPU-{n:02}"
        if n in order[:count]:
            assert visible[cuda_driver.find_uuid(name, visible)] == name
        else:
            with pytest.raises(errors.DeviceNotVisible) as found:
                cuda_driver.find_uuid(name, visible)
            assert found.value.uuid == name
            assert "CUDA_VISIBLE_DEVICES" in str(found.value)


def test_default_streams_differ_by_device_and_the_per_thread_one_by_thread() -> None:
    assert key(DefaultStream(0, 0)) == key(DefaultStream(1, 0))
    assert key(DefaultStream(0, 0)) != key(DefaultStream(0, 1))
    assert key(DefaultStream(2, 0)) != key(DefaultStream(1, 0))
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(key(DefaultStream(2, 0))))
    thread.start()
    thread.join()
    assert seen != [key(DefaultStream(2, 0))]
    assert key(4096) == 4096


@pytest.mark.parametrize(("asked", "mps", "queues"), [("32", 0, 32), ("1", 0, 1), ("", 0, 8), ("99", 0, 8), ("", 1, 2)])
def test_where_the_probe_of_the_queues_begins(
    monkeypatch: pytest.MonkeyPatch, asked: str, mps: int, queues: int
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", asked)
    devices: Any = SimpleNamespace(attribute=lambda index, name: mps)
    assert cuda_probe.expected_queues(devices, 0) == queues


def test_a_handle_has_64_bytes() -> None:
    with pytest.raises(errors.HandleInvalid, match="64 bytes, not 3"):
        cuda_memory.fill_handle(None, b"abc")
    for wrong in (None, "x" * 64, 64):
        with pytest.raises(errors.HandleInvalid, match="64 bytes, not a"):
            cuda_memory.fill_handle(None, wrong)  # type: ignore[arg-type]


def test_what_is_no_array_on_a_gpu_names_create_array() -> None:
    for value in ([1, 2], object(), b"bytes"):
        with pytest.raises(errors.NotExportable, match="create_array"):
            cuda_memory.array_pointer(value)


# -- quarantine


def test_tear_down_that_blocks_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipcsync.backends.cuda_teardown._STUCK", 0.0)
    quarantine, gate, done = Quarantine(), Gate(), threading.Event()
    assert not quarantine.end(gate.hold, moment=0.0)
    assert gate.reached.wait(30)
    assert quarantine.end(done.set, moment=30.0), "what came after a blocked call waits with it"
    assert quarantine.held == 1
    gate.open()
    wait_until(lambda: quarantine.held == 0, "the end of the blocked call")


def test_tear_down_waits_until_it_is_ready_and_errors_end_it() -> None:
    quarantine, ready, done = Quarantine(), threading.Event(), threading.Event()
    assert not quarantine.end(done.set, ready=ready.is_set, moment=0.0)
    assert quarantine.end(lambda: 1 / 0, moment=30.0)
    assert not done.is_set()
    ready.set()
    assert done.wait(30)
    wait_until(lambda: quarantine.held == 0, "the end of the quarantine")


def test_tear_down_is_put_off_while_a_stream_waits() -> None:
    words, pending = memoryview(bytearray(64)).cast("Q"), Pending(lambda event: True)
    assert pending.none()
    for value in range(1, 101):
        pending.add(words, 0, value)
    assert not pending.none()
    words[0] = 99
    assert not pending.none()
    words[0] = 100
    assert pending.none()
    pending.add(words, 1, 1)
    words.release()  # a page that is gone was waited for long ago
    assert pending.none()


def test_tear_down_is_put_off_while_a_stream_waits_for_another_processs_event() -> None:
    done: set[object] = set()
    first, second, gone = (CudaEvent(n, 0, interprocess=True, opened=True) for n in (1, 2, 3))
    pending = Pending(done.__contains__)
    for event in (first, second, first, gone):
        pending.add_event(event)
    assert not pending.none()
    pending.forget_event(gone)  # destroyed: it may not be asked about
    done.add(first)
    assert not pending.none()
    done.add(second)
    assert pending.none()
    done.clear()
    assert pending.none(), "what was seen over is asked about no more"
    pending.add_event(first)
    assert not pending.none(), "but a new wait is"


def test_the_collector_may_come_in_between() -> None:
    """What it collects destroys events, on whatever thread and at whatever point."""
    words = memoryview(bytearray(64)).cast("Q")
    first, second = (CudaEvent(n, 0, interprocess=True, opened=True) for n in (1, 2))
    asked: list[CudaEvent] = []

    def finished(event: CudaEvent) -> bool:
        asked.append(event)
        pending.forget_event(second)
        if len(asked) < 4:
            pending.none()
        return True

    pending = Pending(finished)
    for _ in range(10):
        pending.add(words, 0, 1)
    pending.add_event(first)
    pending.add_event(second)
    assert not pending.none()
    assert asked
    words[0] = 1
    assert pending.none()


def test_the_collector_may_come_while_tear_down_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    quarantine, inner, outer, threads = Quarantine(), threading.Event(), threading.Event(), threading.Thread

    def thread(**options: Any) -> threading.Thread:
        monkeypatch.setattr("threading.Thread", threads)
        quarantine.end(inner.set, moment=0.0)
        return threads(**options)

    monkeypatch.setattr("threading.Thread", thread)
    quarantine.end(outer.set, moment=0.0)
    assert inner.wait(30)
    assert outer.wait(30)
    wait_until(lambda: quarantine.held == 0, "the end of the quarantine")


@pytest.mark.parametrize("device", [0, 1])
def test_a_wait_is_in_the_budget_of_its_streams_device(runtime: Path, device: int) -> None:
    """Whatever device is current: with two GPUs the queues are those of the one whose stream is blocked."""
    backend: Any = CudaBackend.__new__(CudaBackend)
    asked: list[int] = []
    backend.blocked_limit = lambda index: asked.append(index) or 1
    backend.current_device = lambda: 1 - device
    region = Region.create(runtime / "page", 4096)
    region.path.unlink()
    session: Any = SimpleNamespace(check=lambda: None, ledger=SimpleNamespace(region=None))
    raw = KeptStream(4096, object(), device)
    assert Session.admit(session, backend, raw, region, 0, 1, Deadline(0.0), "frame")
    assert asked == [device]
    with pytest.warns(RuntimeWarning, match="wait budget"), pytest.raises(errors.WaitTimeout, match="wait budget"):
        Session.admit(session, backend, KeptStream(8192, object(), device), region, 0, 1, Deadline(0.0), "frame")
    asked.clear()
    assert Session.admit(session, backend, DefaultStream(1, 1 - device), region, 0, 1, Deadline(0.0), "frame")
    assert asked == [1 - device]
    region.close()


class _Stream:
    """A backend of one stream, which is destroyed at the end of a test: it must not be looked at then."""

    def __init__(self) -> None:
        self.busy, self.marks = True, 0

    def stream_query(self, raw: int) -> bool:
        assert raw, "looked at a stream that is gone"
        return not self.busy

    def stream_device(self, raw: KeptStream) -> int:
        return raw.device

    def event_create(self, device: int, **_: object) -> object:
        assert device == 1, "a mark is recorded on a stream of its own device"
        self.marks += 1
        return object()

    def event_record(self, event: object, raw: int) -> None: ...

    def event_query(self, event: object) -> bool:
        return not self.busy

    def event_destroy(self, event: object) -> None:
        self.marks -= 1


def test_whether_a_stream_is_through_is_looked_at_late_but_for_a_bare_pointer() -> None:
    stream: Any = _Stream()
    kept = Passed(stream, KeptStream(4096, object(), 1))
    assert stream.marks == 0
    bare = Passed(stream, KeptStream(4096, 4096, 1))
    assert stream.marks == 1
    assert not kept()
    assert not bare()
    assert stream.marks == 2
    stream.busy = False
    assert kept()
    assert bare()
    del kept, bare
    assert stream.marks == 0


# -- without a GPU


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_without_a_gpu_the_backend_is_a_sentence() -> None:
    with pytest.raises(errors.DeviceUnavailable, match=r"no CUDA device was found.*ipcsync doctor"):
        CudaBackend()


def test_without_cuda_bindings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    cuda_driver.load.cache_clear()
    with pytest.raises(errors.DeviceUnavailable, match=r"pip install.*ipcsync doctor"):
        cuda_driver.load()
    assert cuda_driver.error_name(700) == "CUDA error 700"


def test_a_cupy_for_hip_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hip = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(is_hip=True)))
    monkeypatch.setitem(__import__("sys").modules, "cupy", hip)
    with pytest.raises(errors.Unsupported, match="HIP"):
        cuda_memory.cupy()
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(errors.Unsupported, match="pip install"):
        cuda_memory.cupy()
