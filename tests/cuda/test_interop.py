"""What others make of a slot on a GPU, each in a process of its own; and a host channel that a GPU reads from."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, errors
from ipcsync.backends.cuda import CudaBackend
from ipcsync.shm import Region

from ..harness import Child, Peer

pytestmark = pytest.mark.cuda
Spawn = Callable[..., Child]
SIZE, ITEMS = 4096, 6


def _numba(array: Any, stream: ipcsync.Stream) -> int:
    from numba import cuda

    view = cuda.as_cuda_array(array, sync=False)
    assert view.device_ctypes_pointer.value == array.data.ptr, "it was copied"
    return int(view.copy_to_host(stream=cuda.external_stream(stream.__cuda_stream__()[1])).sum())


def _jax(array: Any, stream: ipcsync.Stream) -> int:
    import jax

    stream.synchronize()  # JAX's streams are its own
    view = jax.dlpack.from_dlpack(array)
    assert view.unsafe_buffer_pointer() == array.data.ptr, "it was copied"
    return int(view.sum())


def _torch(array: Any, stream: ipcsync.Stream) -> int:
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(stream.__cuda_stream__()[1])):
        view = torch.from_dlpack(array)
        assert view.data_ptr() == array.data.ptr, "it was copied"
        return int(view.sum().item())


CONSUMERS = {"numba": _numba, "jax": _jax, "torch": _torch}


def _has(name: str) -> bool:
    if find_spec(name) is None:
        return False
    if name == "numba":
        from numba import cuda

        return bool(cuda.is_available())
    if name == "jax":
        import jax

        try:
            return bool(jax.devices("gpu"))
        except RuntimeError:
            return False
    return True


def _reads(peer: Peer, name: str) -> list[int] | None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if not _has(name):
        peer.send("none")
        return None
    sums = []
    with ipcsync.connect(streams="cupy") as session, session.open_channel("numbers").reader() as reader:
        peer.send("attached")
        stream = ipcsync.Stream("cuda")
        for slot in reader.slots(stream):
            sums.append(CONSUMERS[name](slot.array, stream))
    return sums


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.watchdog(120)
@pytest.mark.fresh("children")
def test_it_reads_a_slot_without_a_copy(session: Session, spawn: Spawn, name: str) -> None:
    channel = session.create_channel("numbers", shape=(SIZE,), dtype="int32", depth=2, device="cuda")
    child = spawn(_reads, name)
    if child.recv(90) == "none":
        pytest.skip(f"{name} is not here, or not for this GPU")
    with channel.writer() as writer:
        for n in range(1, ITEMS + 1):
            with writer.slot() as slot:
                slot.array[...] = n
    assert child.join(60) == [SIZE * n for n in range(1, ITEMS + 1)]


def test_memory_of_a_stream_ordered_pool_is_not_shared(session: Session) -> None:
    """The others that cannot be exported are in test_memory.py; here what a user calls."""
    import cupy

    array = cupy.ndarray((4,), "float32", memptr=cupy.cuda.MemoryAsyncPool().malloc(16))
    with pytest.raises(errors.NotExportable, match=r"cudaMallocAsync.*create_array"):
        session.share("weights", array)
    with pytest.raises(errors.NotFound):
        session.open_array("weights", timeout=0.02)


# -- from the host's memory to the GPU


def _writes_on_the_host(peer: Peer) -> None:
    with ipcsync.connect(name="camera") as session, session.open_channel("frames").writer() as writer:
        peer.send("attached")
        for n in range(1, ITEMS + 1):
            with writer.slot() as slot:
                slot.array[...] = n
            peer.send(n)


def test_a_pinned_slot_is_given_back_by_the_stream_that_copies_it(
    session: Session, backend: CudaBackend, region: Region, spawn: Spawn
) -> None:
    import cupy

    channel = session.create_channel("frames", shape=(SIZE,), dtype="uint64", depth=2, device="cpu")
    seen = cupy.zeros((ITEMS, SIZE), cupy.uint64)
    expected = cupy.arange(1, ITEMS + 1, dtype=cupy.uint64)[:, None]
    assert not bool((seen == expected).all())  # and the kernels are loaded before anything is held
    stream = ipcsync.Stream("cuda")
    with channel.reader(pin=True) as reader:
        child = spawn(_writes_on_the_host)
        assert child.recv(60) == "attached"
        backend.wait(stream._raw, region, 0, 1)

        def take(n: int) -> None:
            slot = reader.get()
            assert slot.number == n
            source = slot.array.__array_interface__["data"][0]
            cupy.cuda.runtime.memcpyAsync(seen[n - 1].data.ptr, source, SIZE * 8, 1, int(stream._raw))
            slot.release(stream)

        for n in (1, 2):
            assert child.recv() == n
            take(n)
        assert not stream.query(), "the copy waited on the host"
        assert not child._connection.poll(0.2), "a buffer was written that the stream has still to copy"
        region.words[0] = 1
        for n in range(3, ITEMS + 1):
            assert child.recv() == n
            take(n)
        stream.synchronize()
    child.join()
    assert bool((seen == expected).all())
