"""Layer 1 on the host when things go wrong: deaths, failed work, forks, interrupts, and the end of the interpreter."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync import Event, Stream, errors
from ipcsync.backends import host_events

from ..harness import TIMEOUT, Child, Gate, Peer, wait_until

Spawn = Callable[..., Child]


# -- the recorder dies


def _records_and_stays(peer: Peer, handle: bytes, done: int) -> None:
    event, stream, gate = Event.from_ipc_handle("cpu", handle), Stream("cpu"), Gate()
    for _ in range(done):
        event.record(stream)
    stream.synchronize()
    stream.enqueue(gate.hold)
    event.record(stream)
    peer.send("recorded")
    peer.recv(600)


def _waits_on_the_host(peer: Peer, handle: bytes, how: str) -> int:
    event = Event.from_ipc_handle("cpu", handle)
    peer.send("waits")
    with pytest.raises(errors.PeerDied) as caught:
        {"synchronize": event.synchronize, "wait": event.wait}[how]()
    return int(caught.value.pid)


@pytest.mark.parametrize("how", ["synchronize", "wait"])
def test_a_killed_recorder_ends_host_waits_everywhere(spawn: Spawn, how: str) -> None:
    event = Event("cpu", interprocess=True)
    recorder = spawn(_records_and_stays, event.ipc_handle(), 3)
    recorder.recv()
    waiters = [spawn(_waits_on_the_host, event.ipc_handle(), how) for _ in range(2)]
    for waiter in waiters:
        assert waiter.recv() == "waits"
    recorder.kill()
    for waiter in waiters:
        assert waiter.join() == recorder.pid
    with pytest.raises(errors.PeerDied, match=str(recorder.pid)):
        event.query()
    with pytest.raises(errors.PeerDied):
        event.synchronize()


def test_a_killed_recorder_fails_the_streams_that_wait_and_what_is_behind_them(spawn: Spawn) -> None:
    event, stream, behind = Event("cpu", interprocess=True), Stream("cpu"), Stream("cpu")
    recorder = spawn(_records_and_stays, event.ipc_handle(), 0)
    recorder.recv()
    stream.wait_event(event)
    ran: list[int] = []
    stream.enqueue(ran.append, 1)
    behind.wait_event(stream.record_event())
    recorder.kill()
    with pytest.raises(errors.StreamFailed) as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, errors.PeerDied)
    with pytest.raises(errors.StreamFailed) as caught:
        behind.synchronize()
    assert isinstance(caught.value.__cause__, errors.PeerFailed)
    assert ran == [], "nothing runs over data that was never finished"


def test_a_recorder_that_ends_with_all_its_records_complete_harms_nobody(spawn: Spawn) -> None:
    event = Event("cpu", interprocess=True)

    recorder = spawn(_records_on_its_thread, event.ipc_handle())
    recorder.join()
    event.synchronize()
    assert event.query()
    event.record()
    assert event.query()


def _records_on_its_thread(peer: Peer, handle: bytes) -> None:
    event = Event.from_ipc_handle("cpu", handle)
    event.record()
    stream = Stream("cpu")
    event.record(stream)
    stream.synchronize()


def test_after_a_death_the_event_is_recorded_anew(spawn: Spawn) -> None:
    event, stream = Event("cpu", interprocess=True), Stream("cpu")
    recorder = spawn(_records_and_stays, event.ipc_handle(), 0)
    recorder.recv()
    recorder.kill()
    event.record(stream)
    event.synchronize()
    assert event.query()


def test_a_stopped_recorder_is_waited_for(spawn: Spawn) -> None:
    event, stream = Event("cpu", interprocess=True), Stream("cpu")
    recorder = spawn(_records_when_told, event.ipc_handle())
    recorder.recv()
    recorder.kill(signal.SIGSTOP)
    stream.wait_event(event)
    with pytest.raises(AssertionError):
        recorder.recv(timeout=0.3)  # several slices of a wait
    assert not event.query()
    assert not stream.query()
    recorder.kill(signal.SIGCONT)
    recorder.send()
    stream.synchronize()
    recorder.join()


def _records_when_told(peer: Peer, handle: bytes) -> None:
    event, stream, gate = Event.from_ipc_handle("cpu", handle), Stream("cpu"), Gate()
    stream.enqueue(gate.hold)
    event.record(stream)
    peer.send()
    peer.recv()
    gate.open()
    stream.synchronize()


# -- work that raises


def _fails(peer: Peer, handle: bytes) -> None:
    event, stream, gate = Event.from_ipc_handle("cpu", handle), Stream("cpu"), Gate()
    stream.enqueue(gate.hold)
    stream.enqueue(lambda: 1 / 0)
    event.record(stream)
    peer.send()
    peer.recv()
    gate.open()
    with pytest.raises(errors.StreamFailed):
        stream.synchronize()
    peer.send()
    peer.recv()


def test_failed_work_of_another_process_is_told(spawn: Spawn) -> None:
    event, stream = Event("cpu", interprocess=True), Stream("cpu")
    child = spawn(_fails, event.ipc_handle())
    child.recv()
    stream.wait_event(event)
    child.send()
    with pytest.raises(errors.PeerFailed) as caught:
        event.synchronize()
    assert caught.value.pid == child.pid
    with pytest.raises(errors.StreamFailed):
        stream.synchronize()
    child.recv()
    for call in (event.query, event.synchronize, event.wait):
        with pytest.raises(errors.PeerFailed):
            call()
    child.send()
    child.join()


def test_a_failed_stream_says_so_everywhere() -> None:
    stream, before, behind, gate = Stream("cpu"), Event("cpu"), Event("cpu"), Gate()
    ran: list[int] = []
    stream.enqueue(gate.hold)
    before.record(stream)
    stream.enqueue({}.__getitem__, "missing")
    behind.record(stream)
    stream.enqueue(ran.append, 1)
    gate.open()
    with pytest.raises(errors.StreamFailed, match="missing") as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, KeyError)
    before.synchronize()
    with pytest.raises(errors.PeerFailed) as failed:
        behind.synchronize()
    assert isinstance(failed.value.__cause__, KeyError), "in the same process the cause is at hand"
    done = Event("cpu")
    done.record()
    for call in (
        stream.synchronize,
        stream.query,
        stream.record_event,
        lambda: stream.enqueue(ran.append, 1),
        lambda: stream.wait_event(done),
        lambda: before.record(stream),
    ):
        with pytest.raises(errors.StreamFailed):
            call()
    assert ran == []
    assert before.query(), "a record that was refused leaves the event as it was"


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_a_call_raises_stays_on_its_stream(raised: BaseException) -> None:
    def work() -> None:
        raise raised

    stream = Stream("cpu")
    stream.enqueue(work)
    with pytest.raises(errors.StreamFailed) as caught:
        stream.synchronize()
    assert caught.value.__cause__ is raised


def test_work_on_the_calling_thread_raises_there() -> None:
    with pytest.raises(ZeroDivisionError):
        ipcsync.current_stream("cpu").enqueue(lambda: 1 / 0)
    ipcsync.current_stream("cpu").synchronize()


def test_a_call_that_waits_for_its_own_stream_is_told() -> None:
    stream = Stream("cpu")
    stream.enqueue(stream.synchronize)
    with pytest.raises(errors.StreamFailed) as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, errors.InvalidState)


def test_a_call_may_use_its_own_stream() -> None:
    stream = Stream("cpu")
    done: list[str] = []

    def work() -> None:
        event = Event("cpu")
        event.record()
        event.synchronize()
        stream.enqueue(done.append, "later")
        done.append("now")

    stream.enqueue(work)
    stream.synchronize()
    stream.synchronize()
    assert done == ["now", "later"]


# -- forks


def _forks(peer: Peer) -> None:
    stream, event, opened = Stream("cpu"), Event("cpu", interprocess=True), Event("cpu")
    handle = event.ipc_handle()
    event.record(stream)
    opened.record(stream)
    stream.synchronize()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (
                stream.synchronize,
                stream.query,
                lambda: stream.enqueue(print),
                stream.record_event,
                event.record,
                event.query,
                event.synchronize,
                event.wait,
                opened.query,
            ):
                with pytest.raises(errors.ForkedProcess, match="spawn"):
                    call()
            anew = Event.from_ipc_handle("cpu", handle)
            assert anew is not event
            own = Stream("cpu")
            anew.record(own)
            anew.synchronize()
            del event, anew, opened, stream
            gc.collect()
            host_events._unlink_ours()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    event.synchronize()
    assert Event.from_ipc_handle("cpu", handle) is event
    peer.send(handle)
    peer.recv()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_and_does_no_harm(spawn: Spawn) -> None:
    child = spawn(_forks)
    event = Event.from_ipc_handle("cpu", child.recv())
    assert event.query(), "the file outlived the forked child"
    child.send()
    child.join()


# -- interrupts


INTERRUPTED = {
    "stream.synchronize": lambda stream, event: stream.synchronize(),
    "event.synchronize": lambda stream, event: event.synchronize(),
    "event.wait": lambda stream, event: event.wait(),
}


@pytest.mark.parametrize("call", INTERRUPTED)
def test_ctrl_c_comes_through(call: str) -> None:
    stream, gate = Stream("cpu"), Gate()
    stream.enqueue(gate.hold)
    event = stream.record_event()
    about_to = threading.Event()

    def wait() -> None:
        about_to.set()
        INTERRUPTED[call](stream, event)

    inside = threading.Thread(target=_interrupt_when_asleep, args=(threading.get_native_id(), about_to))
    inside.start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    inside.join()
    gate.open()
    stream.synchronize()
    assert event.query(), "and nothing was harmed"


def _interrupt_when_asleep(thread: int, about_to: threading.Event) -> None:
    about_to.wait(TIMEOUT)  # starting this thread may wait in a futex as well
    waiting = Path(f"/proc/self/task/{thread}/syscall")
    wait_until(lambda: waiting.read_text().split()[0] == "202", "the wait in a futex")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# -- the end


EXITS = {
    "held": "",
    "exception": "raise RuntimeError('on purpose')",
    "at exit": "import atexit; atexit.register(quick.synchronize)",
    "collected late": "keep = Late()",
    "in a thread": "threading.Thread(target=event.synchronize, daemon=True).start()",
}


@pytest.mark.parametrize("end", EXITS)
def test_the_interpreter_ends_with_work_pending(runtime: Path, end: str) -> None:
    script = f"""
import sys, threading, ipcsync
quick, stream = ipcsync.Stream("cpu"), ipcsync.Stream("cpu")
stream.enqueue(threading.Event().wait)
event = ipcsync.Event("cpu", interprocess=True)
handle = event.ipc_handle()
event.record(stream)
local = stream.record_event()
waiting = ipcsync.Stream("cpu")
waiting.wait_event(event)
quick.enqueue(sys.stdout.write, "done")
quick.synchronize()
class Late:
    def __del__(self, stream=stream, local=local, errors=ipcsync.errors):
        for call in (stream.synchronize, local.synchronize):
            try:
                call()
            except errors.InvalidState:
                pass
sys.modules["later"] = Late() if {end == "collected late"} else None
{EXITS[end]}
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert ended.stdout == "done"
    assert ended.returncode == (end == "exception")
    assert ("on purpose" in ended.stderr) if end == "exception" else ended.stderr == ""
    assert list((runtime / "l1").iterdir()) == []


def _leaves_an_event(peer: Peer) -> None:
    event = Event("cpu", interprocess=True)
    peer.send(event.ipc_handle())
    peer.recv()


def test_what_a_killed_process_left_is_swept(spawn: Spawn, runtime: Path) -> None:
    killed, living = spawn(_leaves_an_event), spawn(_leaves_an_event)
    handles = [killed.recv(), living.recv()]
    killed.kill()
    assert len(list((runtime / "l1").iterdir())) == 2
    (runtime / "l1" / "no-event-of-ours").touch()
    ours = Event("cpu", interprocess=True)
    ours.ipc_handle()
    assert len(list((runtime / "l1").iterdir())) == 3
    with pytest.raises(errors.HandleInvalid, match="gone"):
        Event.from_ipc_handle("cpu", handles[0])
    assert Event.from_ipc_handle("cpu", handles[1]).query()
    (runtime / "l1" / "no-event-of-ours").unlink()
    living.send()
    living.join()


def test_another_runtime_directory_is_named(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = Event("cpu", interprocess=True)
    handle = event.ipc_handle()
    monkeypatch.setattr("ipcsync.event._exported", {})
    for other in (runtime / "other", Path("/nonexistent")):
        monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(other))
        with pytest.raises(errors.HandleInvalid, match="IPCSYNC_RUNTIME_DIR"):
            Event.from_ipc_handle("cpu", handle)


def _exhausts_files(peer: Peer) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    events: list[Event] = []

    def make() -> None:
        for _ in range(100):
            events.append(Event("cpu", interprocess=True))
            events[-1].ipc_handle()

    with pytest.raises(errors.QuotaExceeded, match="ulimit"):
        make()
    events.pop()
    assert len(events) > 20
    events.clear()
    make_one = Event("cpu", interprocess=True)
    assert len(make_one.ipc_handle()) == 64


def test_too_many_interprocess_events_say_what_to_do(spawn: Spawn, runtime: Path) -> None:
    spawn(_exhausts_files).join()
    assert list((runtime / "l1").iterdir()) == []


def test_local_events_need_no_runtime_directory() -> None:
    stream = Stream("cpu")
    event = stream.record_event()
    event.synchronize()
    assert not Path(os.environ["IPCSYNC_RUNTIME_DIR"]).exists()


def test_streams_end_their_threads_when_they_are_let_go() -> None:
    def threads() -> int:
        return sum(thread.name == "ipcsync-stream" for thread in threading.enumerate())

    gc.collect()
    before = threads()
    streams = [Stream("cpu") for _ in range(50)]
    assert threads() >= 50
    for stream in streams:
        stream.enqueue(int)
    del streams, stream
    gc.collect()
    wait_until(lambda: threads() <= before, "the end of the threads")
