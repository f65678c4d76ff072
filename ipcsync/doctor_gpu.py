"""What ``ipcsync doctor`` tries on a GPU; each function runs in a fresh process, its ``*_peer`` in another."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import doctor_links, runtime
from .backends.cuda import CudaBackend
from .backends.cuda_driver import check, load
from .backends.cuda_events import EVENT_LIMIT
from .doctor_probe import FAILS, OK, WARNING, Finding, start
from .errors import DeviceUnavailable, IpcSyncError, RuntimeDirectory
from .shm import Region

_NO_IPC = (
    "ipcsync on cuda needs it: MIG devices have no CUDA IPC; containers must share the host's IPC and pid namespaces "
    '(--ipc=host --pid=host); device="cpu" and via="timeline" work without'
)


def driver() -> Finding:
    try:
        loaded = load()
    except DeviceUnavailable as error:
        return Finding(
            "",
            WARNING,
            str(error),
            "if there is an NVIDIA GPU: install what is named, its driver too, or in a container pass it (--gpus all)",
        )
    version = check(loaded.cuDriverGetVersion(), "cuDriverGetVersion")
    count = CudaBackend().device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    text = f"the driver speaks CUDA {version // 1000}.{version % 1000 // 10}, {count} device(s){shown}"
    if count == 0:
        return Finding("", WARNING, text, "no device is visible: look at CUDA_VISIBLE_DEVICES")
    return Finding("", OK, text)


def count() -> Finding:
    return Finding("", OK, str(CudaBackend().device_count()))


def device(index: str) -> Finding:
    backend, at = CudaBackend(), int(index)
    devices = backend._devices
    name = bytes(check(load().cuDeviceGetName(80, devices.handle(at)), "cuDeviceGetName")).split(b"\0")[0].decode()
    uuid = backend.uuid(at)
    text = f"{name}, {uuid}"
    if uuid.startswith("MIG-"):
        return Finding("", FAILS, f"{text} is a MIG slice, and MIG has no CUDA IPC", 'use a whole GPU, or device="cpu"')
    mode = devices.attribute(at, "COMPUTE_MODE")
    mps = devices.attribute(at, "MPS_ENABLED", -1)
    if mode == 2:
        return Finding("", FAILS, f"{text}: compute mode is prohibited", "nvidia-smi -c DEFAULT")
    if mode == 3 and mps != 1:
        return Finding(
            "", FAILS, f"{text}: compute mode is exclusive, one process only", "nvidia-smi -c DEFAULT, or start MPS"
        )
    if mps == 1:
        return Finding("", OK, f"{text}; MPS is on: hops are fast, but a client killed with a kernel running harms all")
    return Finding(
        "",
        OK,
        f"{text}; no MPS: processes take turns on the GPU, about 0.14 ms a turn (MPS makes hops 10 times faster)",
    )


def links() -> Finding:
    """Which device reads which other's memory, and how."""
    loaded, devices = load(), CudaBackend()._devices
    which = loaded.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    found = {}
    for a in range(devices.count):
        for b in range(devices.count):
            if a != b:
                one, other = devices.handle(a), devices.handle(b)
                access = check(loaded.cuDeviceCanAccessPeer(one, other), "cuDeviceCanAccessPeer")
                atomics = check(loaded.cuDeviceGetP2PAttribute(which, one, other), "cuDeviceGetP2PAttribute")
                found[a, b] = doctor_links.kind(bool(access), bool(atomics))
    return doctor_links.finding(found)


def arrays(index: str) -> Finding:
    """CuPy and cuda-bindings agree with each other and with the driver."""
    backend, at = CudaBackend(), int(index)
    memory = backend.allocate(at, 4096, "")
    try:
        with backend.using(at):
            view = backend.array(memory, 0, (16,), "uint32")
            view += 1
            total = int(view.sum())
    except Exception as error:
        return Finding("", FAILS, f"CuPy cannot compute: {error}", "install the CuPy of your driver's CUDA version")
    return Finding("", OK if total == 16 else FAILS, "CuPy computes")


def memory_operations(index: str) -> Finding:
    backend, at = CudaBackend(), int(index)
    if backend.memory_operations(at):
        return Finding("", OK, "a stream waited for a word of host memory and wrote another")
    why = backend._refused[at]
    return Finding("", FAILS, f"stream memory operations do not work: {why}", 'events need via="cuda-event" here')


def blocked_streams(index: str) -> Finding:
    backend, at = CudaBackend(), int(index)
    limit = backend.blocked_limit(at)
    text = f"{limit} streams of a process may wait for others at once"
    if limit < 6:
        return Finding("", WARNING, text, "set CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts (workers do)")
    return Finding("", OK, text)


@contextmanager
def _page() -> Iterator[Region]:
    """A page where ledgers will be: on the runtime directory's tmpfs."""
    folder = runtime.default_directory().parent
    region = Region.create(folder / f"ipcsync-doctor-{secrets.token_hex(6)}", 4096)
    try:
        yield region
    finally:
        region.path.unlink()


def events(index: str) -> Finding:
    """A stream here waits for an event that another process records behind a held stream."""
    backend, at = CudaBackend(), int(index)
    try:
        event = backend.event_create(at, timing=False, blocking=False, interprocess=True)
        handle = backend.event_export(event)
    except IpcSyncError as error:
        return Finding("", FAILS, str(error), _NO_IPC)
    with _page() as region:
        backend.register(region)
        raw = backend.new_stream(at, 0)
        with start("cuda.events_peer", index, handle.hex(), str(region.path)) as child:
            assert child.stdout is not None
            said = child.stdout.readline().strip()
            if said != "recorded":
                return Finding("", FAILS, f"another process could not open and record an event: {said}", _NO_IPC)
            backend.event_wait(event, raw)
            early = backend.stream_query(raw)
            region.words[0] = 1
            backend.stream_synchronize(raw)
    if early:
        return Finding("", FAILS, "a stream passed an event whose recording stream was still held", _NO_IPC)
    return Finding(
        "", OK, f"a stream waited for an event recorded by another process (at most {EVENT_LIMIT} a process)"
    )


def events_peer(index: str, handle: str, path: str) -> None:
    try:
        backend, region = CudaBackend(), Region.open(Path(path))
        backend.register(region)
        event, raw = backend.event_open(int(index), bytes.fromhex(handle)), backend.new_stream(int(index), 0)
        backend.wait(raw, region, 0, 1)
        backend.event_record(event, raw)
        print("recorded", flush=True)
        backend.stream_synchronize(raw)
    except IpcSyncError as error:
        print(error, flush=True)


def memory(index: str) -> Finding:
    """Another process opens memory of this one and writes into it."""
    backend, at = CudaBackend(), int(index)
    try:
        made = backend.allocate(at, 4096, "")
    except IpcSyncError as error:
        return Finding("", FAILS, str(error), _NO_IPC)
    with start("cuda.memory_peer", index, made.handle.hex()) as child:
        assert child.stdout is not None
        said = child.stdout.readline().strip()
    if said != "written":
        return Finding("", FAILS, f"another process could not open GPU memory: {said}", _NO_IPC)
    with backend.using(at):
        (status,) = load().cuMemcpyDtoH(value := bytearray(4096), made.pointer, 4096)
    if status or value != b"\7" * 4096:
        return Finding("", FAILS, "what another process wrote into GPU memory is not there", _NO_IPC)
    return Finding("", OK, "another process opened GPU memory and wrote into it")


def memory_peer(index: str, handle: str) -> None:
    try:
        backend = CudaBackend()
        opened = backend.open_memory(int(index), bytes.fromhex(handle), 4096, writable=True)
        with backend.using(int(index)):
            check(load().cuMemsetD8(opened.pointer, 7, 4096), "cuMemsetD8")
            check(load().cuCtxSynchronize(), "cuCtxSynchronize")
        print("written", flush=True)
    except IpcSyncError as error:
        print(error, flush=True)


def words(index: str) -> Finding:
    """Streams of two processes take turns on a page, a hundred times: what shared events do."""
    backend, at, rounds = CudaBackend(), int(index), 100
    try:
        runtime.directory(create=False)
    except RuntimeDirectory as error:
        return Finding("", FAILS, str(error), "set IPCSYNC_RUNTIME_DIR to a directory under /dev/shm")
    except IpcSyncError:
        pass  # there is none yet
    with _page() as region:
        backend.register(region)
        raw = backend.new_stream(at, 0)
        with start("cuda.words_peer", index, str(region.path), str(rounds)) as child:
            assert child.stdout is not None
            if child.stdout.readline().strip() != "ready":
                return Finding("", FAILS, "the other process could not reach the page", "both need the same tmpfs")
            began = time.perf_counter()
            for n in range(1, rounds + 1):
                backend.write(raw, region, 0, n)
                backend.wait(raw, region, 8, n)
            backend.stream_synchronize(raw)
            took = (time.perf_counter() - began) / rounds
    return Finding("", OK, f"streams of two processes took turns on a shared page, {1e6 * took:.0f} us a round trip")


def words_peer(index: str, path: str, rounds: str) -> None:
    backend, region = CudaBackend(), Region.open(Path(path))
    backend.register(region)
    raw = backend.new_stream(int(index), 0)
    print("ready", flush=True)
    for n in range(1, int(rounds) + 1):
        backend.wait(raw, region, 0, n)
        backend.write(raw, region, 8, n)
    backend.stream_synchronize(raw)
