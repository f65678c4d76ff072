"""The cuda backend's own logic on a made-up driver with two devices: what is delayed, counted, and where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ipcsync
from ipcsync import errors, wire
from ipcsync.backends import cuda, select
from ipcsync.backends.cuda import CudaBackend
from ipcsync.backends.cuda_events import CudaEvent
from ipcsync.ledger import Cell
from ipcsync.shm import Region

from ..harness import Broker, wait_until
from .made_up_driver import MadeUpDriver


@pytest.fixture
def driver() -> Iterator[MadeUpDriver]:
    made = MadeUpDriver()
    yield made
    made.stop()


@pytest.fixture
def backend(driver: MadeUpDriver, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    monkeypatch.setattr(cuda, "load", lambda: driver)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return CudaBackend()


@pytest.fixture
def region(backend: CudaBackend, runtime: Path) -> Iterator[Region]:
    made = Region.create(runtime / "page", 4096)
    made.path.unlink()
    backend.register(made)
    yield made
    for index in range(len(made.words)):
        made.words[index] = 2**63 - 1
    backend.unregister(made)


def test_a_stream_waits_for_a_word_and_writes_another(backend: CudaBackend, region: Region) -> None:
    raw = backend.new_stream(1, 0)
    backend.wait(raw, region, 0, 5)
    backend.write(raw, region, 8, 7)
    assert not backend.stream_query(raw)
    region.words[0] = 5
    backend.stream_synchronize(raw)
    assert region.words[8] == 7


@pytest.mark.parametrize("count", [1, 2, 300])
def test_a_stream_waits_for_all_words_of_several(backend: CudaBackend, region: Region, count: int) -> None:
    first, second = backend.new_stream(1, 0), backend.new_stream(1, 0)
    backend.wait_for_all(first, region, [(index, 5) for index in range(count)])
    backend.wait_for_all(second, region, [(index, 6) for index in range(count)])  # the first's stay what they were
    for last in range(count):
        region.words[last] = 4
        assert not backend.stream_query(first)
        region.words[last] = 5
    assert backend.stream_query(first)
    assert not backend.stream_query(second)
    assert not backend._pending.none()
    for index in range(count):
        region.words[index] = 6
    backend.stream_synchronize(second)
    assert backend._pending.none()


def test_streams_know_their_device(backend: CudaBackend) -> None:
    own = [backend.new_stream(device, 0) for device in (0, 1)]
    assert [backend.stream_device(raw) for raw in own] == [0, 1]
    found = backend.foreign_stream(int(own[1]))
    assert found is not None
    assert (found, backend.stream_device(found[0])) == ((own[1], 1), 1)
    assert backend.stream_device(int(own[1])) == 1, "a bare pointer is asked about"
    with backend.using(1):
        null = backend.foreign_stream(0)
    assert null is not None
    assert (null[1], backend.stream_device(null[0])) == (1, 1)
    assert backend.current_device() == 0
    assert [backend.index(backend.uuid(n)) for n in (0, 1)] == [0, 1]


def test_queues_are_probed_for_each_device_and_a_quarter_stays_free(
    backend: CudaBackend, driver: MadeUpDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [backend.blocked_limit(device) for device in (0, 1)] == [6, 6]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr("ipcsync.backends.cuda_probe._PATIENCE", 0.01)
    assert CudaBackend().blocked_limit(0) == 6, "believed, though CUDA had read the variable before"
    driver.queues = 2
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert CudaBackend().blocked_limit(0) == 1


def test_a_probe_that_holds_up_another_library_lets_go(
    driver: MadeUpDriver, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a library frees memory behind our blocked stream, CUDA creates no stream: it would be for ever."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr("ipcsync.backends.cuda_probe._STUCK", 0.5)
    busy, create = [True, True], driver.cuStreamCreate

    def stalls(flags: int) -> Any:
        made = create(flags)
        if busy and driver._go_on():
            wait_until(lambda: not driver._go_on(), "the end of the streams' waits")
            busy.pop()
        return made

    driver.queues = 32
    monkeypatch.setattr(driver, "cuStreamCreate", stalls)
    assert backend.blocked_limit(0) == 24
    assert busy == []
    busy += [True] * 9
    assert CudaBackend().blocked_limit(0) == 6, "what cannot be tried is not believed"


def _other_processs_event(backend: CudaBackend, driver: MadeUpDriver, device: int) -> CudaEvent:
    with backend.using(device):
        address = driver.cuEventCreate(6)[1]
    driver.events[address].pending = 1  # recorded there, on a stream that has not got to it
    handle = (b"theirs%d" % address).ljust(64, b"\0")
    driver.foreign[handle] = address
    return backend.event_open(device, handle)


@pytest.mark.parametrize("waits_for", ["a word", "an event of another process"])
def test_nothing_is_taken_back_while_a_stream_waits(
    backend: CudaBackend, driver: MadeUpDriver, region: Region, runtime: Path, waits_for: str
) -> None:
    """The driver's assertion in _would_wait is the point: it fails in the thread that tears down."""
    raw, memory = backend.new_stream(1, 0), backend.allocate(0, 8, "")
    page = Region.create(runtime / "other", 4096)
    page.path.unlink()
    backend.register(page)
    event = _other_processs_event(backend, driver, 0)
    if waits_for == "a word":
        backend.wait(raw, region, 0, 1)
    else:
        backend.event_wait(event, raw)
    backend.free(memory)
    backend.unregister(page)
    backend.event_destroy(event)
    assert not backend.stream_query(raw)
    assert memory.pointer in driver.memory
    assert page.address in driver.registered
    region.words[0] = 1
    assert int(event) in driver.events, "it was destroyed while a stream waited for it"
    driver.events[int(event)].pending = 0
    wait_until(lambda: backend._quarantine.held == 0, "the end of the quarantine")
    assert memory.pointer not in driver.memory
    assert page.address not in driver.registered
    assert int(event) not in driver.events
    assert backend.stream_query(raw)


def test_an_event_that_was_destroyed_is_not_asked_about(backend: CudaBackend, driver: MadeUpDriver) -> None:
    raw = backend.new_stream(0, 0)
    for _ in range(50):
        event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
        backend.event_record(event, raw)
        backend.event_wait(event, raw)
        backend.event_destroy(event)  # which asks whether it is finished, and forgets it
        backend.free(backend.allocate(0, 8, ""))  # which asks whether anything is waited for
    assert backend._quarantine.held == 0
    assert not driver.events


def test_whether_a_stream_has_passed_is_asked_on_its_own_device(
    backend: CudaBackend, driver: MadeUpDriver, region: Region
) -> None:
    raw = backend.new_stream(1, 0)
    backend.wait(raw, region, 0, 1)
    passed = backend.passed(raw)
    assert not passed()  # and marks it: an event of device 0 would be refused there
    assert not passed()
    region.words[0] = 1
    assert passed()


def test_streams_of_one_device_wait_for_events_of_the_other(backend: CudaBackend, region: Region) -> None:
    event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    here, there = backend.new_stream(0, 0), backend.new_stream(1, 0)
    backend.wait(here, region, 0, 1)
    backend.event_record(event, here)
    backend.event_wait(event, there)
    assert not backend.stream_query(there)
    with pytest.raises(errors.CudaError):
        backend.event_record(event, there)
    region.words[0] = 1
    backend.stream_synchronize(there)
    backend.event_destroy(event)


def test_a_handle_that_opens_nothing(backend: CudaBackend) -> None:
    for bad in (b"", b"\1" * 64, None, "x" * 64):
        with pytest.raises(errors.HandleInvalid):
            backend.event_open(0, bad)  # type: ignore[arg-type]


# -- sessions; their broker sees no GPU, and serves timelines


@pytest.fixture
def session(backend: CudaBackend, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[ipcsync.Session]:
    monkeypatch.setitem(select._made, "cuda", backend)
    monkeypatch.setattr(backend, "using_stream", lambda raw, device: backend.using(device))  # there is no CuPy
    with ipcsync.connect(manage_env=False) as made:
        yield made


def test_a_shared_event_of_one_device_is_waited_for_on_the_other(
    session: ipcsync.Session, backend: CudaBackend, region: Region
) -> None:
    event, slow = session.create_event("e", device="cuda:0"), ipcsync.Stream("cuda:0")
    there, current, bare = (ipcsync.Stream("cuda:1") for _ in range(3))
    backend.wait(slow._raw, region, 0, 1)
    n = event.record(slow)
    with pytest.raises(errors.WrongDevice):
        event.record(there)
    event.wait(there, round=n)
    with current:
        event.wait(round=n)
    event.wait(int(bare._raw), round=n)  # which is asked for its device
    assert not there.query()
    assert not current.query()
    assert not bare.query()
    region.words[0] = 1
    event.synchronize(round=n)
    there.synchronize()
    current.synchronize()


def test_each_device_has_its_budget_and_one_thread_beyond_it_is_told(
    session: ipcsync.Session, backend: CudaBackend, region: Region
) -> None:
    event, slow = session.create_event("held", device="cuda:0"), ipcsync.Stream("cuda:0")
    backend.wait(slow._raw, region, 0, 1)
    event.record(slow)
    streams = [ipcsync.Stream(f"cuda:{device}") for device in (0, 1) for _ in range(6)]
    for stream in streams:  # without `slow`, which waits for a word of nobody's: 6 of 8 on each
        event.wait(stream, round=1, block=False)
    for device in (0, 1):
        beyond = ipcsync.Stream(f"cuda:{device}")
        with pytest.raises(errors.WouldBlock, match="budget"):
            event.wait(beyond, round=1, block=False)
        with (
            pytest.warns(RuntimeWarning, match="wait budget"),
            pytest.raises(errors.WaitTimeout, match="budget") as told,
        ):
            event.wait(beyond, round=1, timeout=0.05)
        assert told.value.budget == 6
        assert beyond.query(), "nothing was enqueued"
    event.wait(streams[0], round=1, block=False)  # a stream counts once
    region.words[0] = 1
    for stream in streams:
        stream.synchronize()
    event.wait(beyond, round=1, block=False)


def test_the_cuda_event_that_is_handed_out_outlives_the_handle_and_is_opened_anew(
    session: ipcsync.Session, backend: CudaBackend, driver: MadeUpDriver
) -> None:
    event = session.create_event("e", device="cuda:1")
    theirs = _other_processs_event(backend, driver, 1)
    handle = next(iter(driver.foreign))
    info = msgspec.structs.replace(event.info, handle=handle)
    timeline = session.open_timeline(info)
    kept = timeline.cuda_event
    assert kept is not None
    assert (kept.device.index, kept.ipc_handle(), kept.cuda_event > 0) == (1, handle, True)
    with pytest.raises(errors.InvalidState, match="CPU"):
        _ = ipcsync.Event("cpu").cuda_event
    event.close()
    assert timeline.cuda_event is None
    assert not kept.query(), "it was destroyed under its holder's hands"
    again = session.open_timeline(info)
    assert again.cuda_event is not None
    assert again.cuda_event is not kept
    driver.events[int(theirs)].pending = 0


def test_streams_that_waited_once_are_let_go(
    session: ipcsync.Session, backend: CudaBackend, driver: MadeUpDriver, region: Region
) -> None:
    event, slow = session.create_event("e", device="cuda:0"), ipcsync.Stream("cuda:0")
    for n in range(1, 201):
        backend.wait(slow._raw, region, 0, n)
        assert event.record(slow) == n
        stream = ipcsync.Stream("cuda:0")
        event.wait(stream, round=n)
        event.wait(stream, round=n)  # the way of a stream that is known
        region.words[0] = n
        stream.synchronize()
    assert len(driver.of_stream) < 100


@pytest.mark.parametrize("kind", ["event", "channel", "array"])
def test_what_is_on_a_gpu_that_is_not_seen_is_refused_and_not_held(session: ipcsync.Session, kind: str) -> None:
    far, made = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff", None
    deadline = session.deadline()
    if kind == "event":
        made = session.request(
            "create_event", wire.CreateEvent("far", far, "timeline", False, "session"), wire.EventInfo, deadline
        )
    else:
        here = session.create_channel("c", shape=(1,), dtype="uint8", device="cpu").spec
        memory = wire.MemoryInfo(b"x" * 64, 4096, far)
        if kind == "channel":
            spec = msgspec.structs.replace(here, memory="session")
            body: Any = wire.CreateChannel("far", far, spec, False, memory)
            made = session.request("create_channel", body, wire.ChannelInfo, deadline).event
        else:
            array = wire.ArraySpec(here.fields, memory="session", max_readers=2, single=True)
            body = wire.CreateArray("far", far, array, False, (memory,))
            made = session.request("create_array", body, wire.ArrayInfo, deadline).event
    with ipcsync.connect(manage_env=False) as other:
        with pytest.raises(errors.DeviceNotVisible, match="CUDA_VISIBLE_DEVICES") as refused:
            getattr(other, f"open_{kind}")("far")
        assert refused.value.uuid == far
        session.unlink("far")
        session.request("detach", wire.Detach(made.incarnation), wire.Empty, deadline)
        state = session.ledger.cell(made.cell) + Cell.STATE
        wait_until(lambda: session.ledger.words[state] == Cell.FREE, "the end of what nobody holds")
