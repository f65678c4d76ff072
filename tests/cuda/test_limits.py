"""How many, and for how long: events beyond CUDA's limit, cycles that end where they began, memory let go too early."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync import Session, errors
from ipcsync.backends.cuda import CudaBackend
from ipcsync.shm import Region

from ..harness import Broker, Child, Peer, wait_until
from . import gpu

pytestmark = pytest.mark.cuda
Spawn = Callable[..., Child]
CYCLES = int(os.environ.get("IPCSYNC_CYCLES", "2000"))  # 25,000 takes a minute
TIMELINES = int(os.environ.get("IPCSYNC_TIMELINES", "10000"))


@pytest.mark.slow
@pytest.mark.watchdog(300)
@pytest.mark.fresh("broker")
def test_the_broker_says_so_before_cuda_does_and_timelines_go_on(session: Session) -> None:
    events: list[Any] = []

    def fill() -> None:
        for n in range(4097):
            events.append(session.create_event(f"e{n}", device="cuda"))

    with pytest.raises(errors.QuotaExceeded, match="timeline"):
        fill()
    assert len(events) > 4000
    stream = ipcsync.Stream("cuda")
    timelines = [session.create_event(f"t{n}", device="cuda", via="timeline") for n in range(TIMELINES)]
    for event in timelines:
        assert event.record(stream) == 1
    stream.synchronize()
    assert all(event.query(round=1) for event in timelines)
    for event in events:
        event.close()


def _footprint(pid: int) -> tuple[int, float]:
    """(open files, MiB resident) of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.watchdog(300)
@pytest.mark.fresh("broker")
def test_create_and_release_end_where_they_began(broker: Broker, session: Session) -> None:
    stream = ipcsync.Stream("cuda")

    def cycle(n: int) -> None:
        with session.create_event("again", device="cuda") as event:
            if n % 100 == 0:
                event.record(stream)
        session.unlink("again")

    for n in range(200):  # what is made once
        cycle(n)
    before = {pid: _footprint(pid) for pid in (os.getpid(), broker.pid)}
    for n in range(CYCLES):
        cycle(n)
    for pid, (files, resident) in before.items():
        now = _footprint(pid)
        assert now[0] <= files + 2
        assert now[1] < resident + 64, "MiB resident"
    assert session.create_event("again", device="cuda").record(stream) == 1


# -- what is let go while a stream waits


def _mapped(backend: CudaBackend, pointer: int) -> bool:
    """Whether CUDA still knows the address in this process."""
    return backend._memories._attribute("MEMORY_TYPE", pointer) is not None


def test_memory_let_go_while_a_stream_waits_comes_back_when_it_goes_on(backend: CudaBackend, region: Region) -> None:
    held = backend._quarantine.held  # what a dead process recorded, in another test, stays there for good
    raw = backend.new_stream(0, 0)
    memories = [backend.allocate(0, 64 << 20, "") for _ in range(4)]
    backend.wait(raw, region, 0, 1)
    for memory in memories:
        backend.free(memory)
    assert not backend.stream_query(raw), "freeing waited for the stream"
    assert all(_mapped(backend, memory.pointer) for memory in memories)
    region.words[0] = 1
    wait_until(lambda: not any(_mapped(backend, memory.pointer) for memory in memories), "the memory's coming back")
    wait_until(lambda: backend._quarantine.held <= held, "the end of their quarantine")


def _records_held(peer: Peer, event: bytes) -> None:
    """Records the event behind a word that is stored when the test says so."""
    backend = gpu.here()
    opened, raw = backend.event_open(0, event), backend.new_stream(0, 0)
    region = gpu.hold(backend, raw)
    backend.event_record(opened, raw)
    peer.send("recorded")
    peer.recv()
    region.words[0] = 1
    backend.stream_synchronize(raw)


def test_a_wait_for_another_processs_event_puts_freeing_off_as_well(backend: CudaBackend, spawn: Spawn) -> None:
    event, raw = backend.event_create(0, timing=False, blocking=False, interprocess=True), backend.new_stream(0, 0)
    child = spawn(_records_held, backend.event_export(event))
    assert child.recv(60) == "recorded"
    memory = backend.allocate(0, 8, "")
    backend.event_wait(event, raw)
    backend.free(memory)
    assert _mapped(backend, memory.pointer)
    assert not backend.stream_query(raw), "freeing waited for the other process"
    child.send()
    wait_until(lambda: not _mapped(backend, memory.pointer), "the memory's coming back")
    child.join()
    backend.event_destroy(event)


def _waits_for_ever(peer: Peer, event: bytes) -> None:
    """Holds memory back for a stream that will never go on, and ends all the same."""
    backend = gpu.here()
    opened, raw, memory = backend.event_open(0, event), backend.new_stream(0, 0), backend.allocate(0, 8, "")
    backend.event_wait(opened, raw)
    backend.free(memory)
    peer.send("waiting")
    peer.recv()
    backend.free(backend.allocate(0, 8, ""))
    assert not backend.stream_query(raw)


@pytest.mark.fresh("children")
def test_a_process_whose_stream_never_goes_on_still_ends(backend: CudaBackend, spawn: Spawn) -> None:
    event = backend.event_create(0, timing=False, blocking=False, interprocess=True)
    recorder = spawn(_records_held, backend.event_export(event))
    assert recorder.recv(60) == "recorded"
    waiter = spawn(_waits_for_ever, backend.event_export(event))
    assert waiter.recv(60) == "waiting"
    recorder.kill()
    waiter.send()
    waiter.join()


def _gives_anew(peer: Peer) -> None:
    """Exports memory filled with 1, then, where that was, memory filled with 2."""
    from cuda.bindings import driver

    backend = gpu.here()
    for value in (1, 2):
        memory = backend.allocate(0, 4096, "")
        with backend.using(0):
            driver.cuMemsetD8(memory.pointer, value, 4096)
            driver.cuCtxSynchronize()
        peer.send(memory.handle)
        peer.recv()
        backend.free(memory)


@pytest.mark.fresh("children")
def test_new_memory_is_not_taken_for_what_is_still_to_be_closed(
    backend: CudaBackend, region: Region, spawn: Spawn
) -> None:
    """Handles may be byte for byte those of memory that was freed: while the old mapping is in quarantine here, the new
    one opens as what it is, or not at all."""
    child, raw, held = spawn(_gives_anew), backend.new_stream(0, 0), backend._quarantine.held
    old = backend.open_memory(0, child.recv(60), 4096, writable=True)
    backend.wait(raw, region, 0, 1)
    backend.free(old)  # which the stream puts off
    child.send()
    try:
        new = backend.open_memory(0, child.recv(), 4096, writable=True)
    except errors.HandleInvalid:
        new = None
    if new is not None:
        assert gpu.word_at(backend, new.pointer) == 0x0202020202020202
        backend.free(new)
    child.send()
    region.words[0] = 1
    wait_until(lambda: backend._quarantine.held <= held, "the end of the quarantine")
    child.join()
