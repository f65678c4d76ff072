"""Two GPUs: devices by UUID whatever each process sees, events and channels from one GPU to the other, and death."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, errors
from ipcsync.backends import select
from ipcsync.backends.cuda import CudaBackend

from ..harness import Child, Peer, wait_until
from . import gpu

pytestmark = [pytest.mark.cuda, pytest.mark.cuda2]
Spawn = Callable[..., Child]
SIZE = 4096
ROUNDS = int(os.environ.get("IPCSYNC_ROUNDS", "1000"))


@pytest.fixture(autouse=True)
def two(backend: CudaBackend) -> None:
    if backend.device_count() < 2:
        pytest.skip(f"needs two GPUs; this process sees {backend.device_count()}")


def _create(session: Session, name: str, device: str, via: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # cuda-event says what it cannot promise
        return session.create_event(name, device=device, via=via)  # type: ignore[arg-type]


# -- which GPU


def _sees(peer: Peer) -> dict[str, Any]:
    """Opens what is on each GPU, and says under which ordinal, or that it cannot."""
    backend, found = gpu.here(), {}
    with ipcsync.connect() as session:
        for name in ("e0", "e1", "c0", "c1"):
            try:
                if name.startswith("e"):
                    event = session.open_event(name)
                    uuid, ordinal = event.device.uuid, event.device.index
                    stream = ipcsync.Stream(event.device)
                    event.wait(stream, round=1)
                    stream.synchronize()
                    found[name] = uuid, ordinal
                else:
                    with session.open_channel(name).reader(start="oldest") as reader, reader.get() as slot:
                        device = slot.array.device.id
                        found[name] = backend.uuid(device), int(slot.array.sum()) // SIZE
            except errors.DeviceNotVisible as error:
                found[name] = "not visible", error.uuid
    return found


@pytest.mark.parametrize("order", ["all", "second by index", "second by uuid", "reversed", "first"])
def test_each_process_opens_the_right_gpu_or_says_that_it_does_not_see_it(
    session: Session, backend: CudaBackend, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    uuids = [backend.uuid(0), backend.uuid(1)]
    writers = []
    for n in (0, 1):
        stream = ipcsync.Stream(f"cuda:{n}")
        assert session.create_event(f"e{n}", device=f"cuda:{n}").record(stream) == 1
        channel = session.create_channel(f"c{n}", shape=(SIZE,), dtype="int32", depth=2, device=f"cuda:{n}")
        writers.append(channel.writer())
        with writers[-1].slot(stream) as slot:
            assert slot.array.device.id == n
            slot.array[...] = 10 + n
    visible = {"second by index": "1", "second by uuid": uuids[1], "reversed": "1,0", "first": "0"}.get(order)
    if visible is not None:
        already = os.environ.get("CUDA_VISIBLE_DEVICES")  # ordinals below are of the machine's, not of this process's
        if already and order != "second by uuid":
            visible = ",".join(already.split(",")[int(n)] for n in visible.split(","))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = spawn(_sees).join(60)
    seen = {"all": [0, 1], "second by index": [1], "second by uuid": [1], "reversed": [1, 0], "first": [0]}[order]
    for n in (0, 1):
        if n in seen:
            assert found[f"e{n}"] == (uuids[n], seen.index(n))
            assert found[f"c{n}"] == (uuids[n], 10 + n)
        else:
            assert found[f"e{n}"] == found[f"c{n}"] == ("not visible", uuids[n])
    for writer in writers:
        writer.close()


# -- events from one to the other


def _records(peer: Peer, name: str, memory: bytes, rounds: int) -> None:
    """On GPU 0: each round behind a kernel that takes its time, then stores the round's number."""
    with ipcsync.connect(name="recorder") as session:
        event, stream, backend = session.open_event(name), ipcsync.Stream("cuda:0"), select.backend("cuda")
        there = backend.open_memory(0, memory, 8, writable=True)
        with backend.using(0):
            for n in range(1, rounds + 1):
                peer.recv()
                gpu.spin(backend, stream._raw, 2, there.pointer, n)
                assert event.record(stream) == n
        stream.synchronize()
        backend.free(there)


@pytest.mark.parametrize("via", ["auto", "timeline", "cuda-event"])
def test_a_stream_of_one_gpu_waits_for_the_other(
    session: Session, backend: CudaBackend, spawn: Spawn, via: str
) -> None:
    import cupy

    rounds = 50
    event, stream = _create(session, "across", "cuda:0", via), ipcsync.Stream("cuda:1")
    memory = backend.allocate(0, 8, "")
    child = spawn(_records, "across", memory.handle, rounds)
    with cupy.cuda.Device(1):
        out = cupy.zeros(rounds, cupy.uint64)
        cupy.cuda.get_current_stream().synchronize()
    for n in range(1, rounds + 1):
        child.send()
        event.wait(stream, round=n)
        # On GPU 1's stream, behind the wait: an explicit copy, which needs no peer access.
        _copy_across(backend, out.data.ptr + 8 * (n - 1), 1, memory.pointer, 0, 8, stream)
        stream.synchronize()
        assert event.query(round=n)
    assert out.get().tolist() == list(range(1, rounds + 1))
    child.join()
    backend.free(memory)


def _copy_across(
    backend: CudaBackend, target: int, on: int, source: int, of: int, nbytes: int, stream: ipcsync.Stream
) -> None:
    from cuda.bindings import driver

    contexts = backend._devices.context
    (status,) = driver.cuMemcpyPeerAsync(target, contexts(on), source, contexts(of), nbytes, int(stream._raw))
    assert not status


def test_the_current_stream_waits_whatever_its_gpu(session: Session, backend: CudaBackend) -> None:
    """Were it the event's device whose current stream waits, what follows here would not be behind it."""
    event, slow, here = session.create_event("e", device="cuda:0"), ipcsync.Stream("cuda:0"), ipcsync.Stream("cuda:1")
    gpu.spin(backend, slow._raw, 0)
    slow.synchronize()
    gpu.spin(backend, slow._raw, 300)
    n = event.record(slow)
    with here:
        event.wait(round=n)
    assert not here.query()
    here.synchronize()
    assert event.query(round=n)


# -- a channel on GPU 0, read from GPU 1


def _writes(peer: Peer, items: int) -> None:
    with ipcsync.connect(name="writer") as session, session.open_channel("frames").writer() as writer:
        stream = ipcsync.Stream("cuda:0")
        for n in range(1, items + 1):
            with writer.slot(stream) as slot:
                gpu.fill(slot.array, n, microseconds=2000)


def _peers() -> bool:
    from cuda.bindings import driver

    return bool(driver.cuDeviceCanAccessPeer(1, 0)[1])


def _enable_peer_access() -> None:
    """Of GPU 1, which is current, to GPU 0."""
    import cupy

    try:
        cupy.cuda.runtime.deviceEnablePeerAccess(0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != 704:  # it is enabled already
            raise


@pytest.mark.parametrize("how", ["peer access", "copy"])
def test_a_channel_is_read_from_the_other_gpu(session: Session, backend: CudaBackend, spawn: Spawn, how: str) -> None:
    import cupy

    if how == "peer access" and not _peers():
        pytest.skip("GPU 1 has no peer access to GPU 0: the copy is the way")
    items = 60
    channel = session.create_channel("frames", shape=(SIZE,), dtype="uint64", depth=3, device="cuda:0")
    with cupy.cuda.Device(1):
        seen = cupy.zeros((items, SIZE), cupy.uint64)
        cupy.cuda.get_current_stream().synchronize()
        if how == "peer access":
            _enable_peer_access()
    stream = ipcsync.Stream("cuda:1")
    with channel.reader() as reader:
        child = spawn(_writes, items)
        for slot in reader.slots(stream):
            assert slot.array.device.id == 0
            row = seen[slot.number - 1]
            with backend.using_stream(stream._raw, 1):
                if how == "peer access":
                    gpu.copy(slot.array, row)
                else:
                    row.data.copy_from_device_async(slot.array.data, slot.array.nbytes)
        stream.synchronize()
    child.join()
    with cupy.cuda.Device(1):
        assert bool((seen == cupy.arange(1, items + 1, dtype=cupy.uint64)[:, None]).all())


# -- a chain that goes from one to the other and back


def _source(peer: Peer, items: int) -> None:
    with ipcsync.connect(name="source") as session, session.open_channel("raw").writer() as writer:
        peer.send("attached")
        peer.recv()
        stream = ipcsync.Stream("cuda:0")
        for n in range(1, items + 1):
            with writer.slot(stream) as slot:
                gpu.fill(slot.array, n, microseconds=50)


def _middle(peer: Peer) -> None:
    import cupy

    with (
        ipcsync.connect(name="middle") as session,
        session.open_channel("raw").reader() as reader,
        session.open_channel("done").writer() as writer,
    ):
        stream = ipcsync.Stream("cuda:1")
        with cupy.cuda.Device(1):
            here = cupy.empty(SIZE, cupy.uint64)
        peer.send("attached")
        for slot in reader.slots(stream):
            with writer.slot(stream) as out:
                here.data.copy_from_device_async(slot.array.data, slot.array.nbytes)
                gpu.add_one(here, out.array, microseconds=50)


def test_a_chain_over_both_gpus(session: Session, spawn: Spawn) -> None:
    import cupy

    for name, device in (("raw", "cuda:0"), ("done", "cuda:1")):
        session.create_channel(name, shape=(SIZE,), dtype="uint64", depth=3, device=device)
    seen, stream, numbers = cupy.zeros((ROUNDS, SIZE), cupy.uint64), ipcsync.Stream("cuda:0"), []
    cupy.cuda.get_current_stream().synchronize()
    with session.open_channel("done").reader() as reader:
        middle, source = spawn(_middle), spawn(_source, ROUNDS)
        assert middle.recv(60) == source.recv(60) == "attached"
        source.send()
        for slot in reader.slots(stream):
            with stream:
                seen[slot.number - 1].data.copy_from_device_async(slot.array.data, slot.array.nbytes)
            numbers.append(slot.number)
        stream.synchronize()
    source.join()
    middle.join()
    assert numbers == list(range(1, ROUNDS + 1))
    assert bool((seen == cupy.arange(2, ROUNDS + 2, dtype=cupy.uint64)[:, None]).all())


# -- death


def _records_slowly(peer: Peer) -> None:
    with ipcsync.connect(name="victim") as session:
        event, stream, backend = session.open_event("mortal"), ipcsync.Stream("cuda:0"), select.backend("cuda")
        gpu.spin(backend, stream._raw, 0)
        event.record(stream)
        event.synchronize()
        gpu.spin(backend, stream._raw, 5000)
        peer.send(event.record(stream))
        peer.recv()


@pytest.mark.parametrize("via", ["auto", "timeline"])
def test_a_recorder_killed_on_one_gpu_releases_the_other(session: Session, spawn: Spawn, via: str) -> None:
    event, stream = _create(session, "mortal", "cuda:0", via), ipcsync.Stream("cuda:1")
    mine, behind = session.create_event("mine", device="cuda:1"), ipcsync.Stream("cuda:1")
    child = spawn(_records_slowly)
    n = child.recv(60)
    event.wait(stream, round=n)
    mine.record(stream)
    mine.wait(behind, round=1)
    assert not behind.query()
    child.kill()
    for condemned, round in ((event, n), (mine, 1)):
        with pytest.raises(errors.PeerDied, match="victim"):
            condemned.synchronize(round=round)
    wait_until(lambda: stream.query() and behind.query(), "the release of both streams on the other GPU")
    assert event.completed == n - 1
    assert mine.completed == 0


# -- the budget


def test_each_gpu_has_a_budget_of_its_own(session: Session, backend: CudaBackend) -> None:
    event, slow = session.create_event("held", device="cuda:0"), ipcsync.Stream("cuda:0")
    gpu.spin(backend, slow._raw, 0)
    slow.synchronize()
    gate = gpu.page(session.runtime)
    gate.path.unlink()
    backend.register(gate)
    backend.wait(slow._raw, gate, 0, 1)
    event.record(slow)
    limits = [backend.blocked_limit(n) for n in (0, 1)]
    streams = [[ipcsync.Stream(f"cuda:{n}") for _ in range(limit)] for n, limit in enumerate(limits)]
    try:
        for several in streams:
            for stream in several:  # `slow` waits for a word outside of the budget
                event.wait(stream, round=1, block=False)
        for n in (0, 1):
            with pytest.raises(errors.WouldBlock, match="budget"):
                event.wait(ipcsync.Stream(f"cuda:{n}"), round=1, block=False)
    finally:
        gate.words[0] = 1
    for several in streams:
        for stream in several:
            stream.synchronize()
    backend.unregister(gate)
