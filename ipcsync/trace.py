"""Where the time goes: spans in the Chrome trace-event format, which Perfetto and chrome://tracing open.

A process records while :data:`ACTIVE` is a :class:`Recorder`; where it is None a hook costs one look at a global::

    recorder = trace.ACTIVE
    if recorder is not None: ...

Each process writes a *part*, a file of JSON lines, as it goes (a killed process loses at most its last few events);
:func:`merge` makes one trace of many parts. All times are ``CLOCK_MONOTONIC``, which every process of a machine shares.

========  ==========================================================================================================
category  spans
========  ==========================================================================================================
stage     a stage's whole run, ``name`` is the stage's
call      one call of a stage's function
slot      a buffer held, from its taking to its release or publication; ``args``: side, item
wait      a host wait; ``args``: ``for`` ("input", "space", "completion", "budget"), round
gpu       work on a stream, by CUDA's own clock; on a track of its own
hop       from an item's publication to its taking by a reader (asynchronous: hops overlap); an arrow joins both slots
========  ==========================================================================================================
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trace_gpu import GpuSpans

ACTIVE: Recorder | None = None

_FLUSH_EVENTS, _FLUSH_NS = 512, 500_000_000
_NOTHING: AbstractContextManager[None] = nullcontext()


class Recorder:
    """The spans of one process, written to the part file `path`. Any thread may record."""

    def __init__(self, path: Path, process: str) -> None:
        self.path, self.pid = path, os.getpid()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._events: list[dict[str, Any]] = []
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._written = time.monotonic_ns()
        self._stacks = threading.local()
        self._gpu: GpuSpans | None = None
        self._add({"name": "process_name", "ph": "M", "pid": self.pid, "tid": 0, "args": {"name": process}})

    # -- what is recorded

    def span(
        self, category: str, name: str, start: int, end: int | None = None, args: dict[str, Any] | None = None
    ) -> None:
        """This thread's time from `start` to `end` (``time.monotonic_ns``; None is now)."""
        end = time.monotonic_ns() if end is None else end
        self._add(self._event("X", category, name, start, dur=(end - start) / 1e3, args=args or {}))

    def opened(self, slot: object) -> None:
        """This thread holds a slot from now on, until :meth:`released`."""
        stack = self._stacks.__dict__.setdefault("slots", [])
        stack.append((id(slot), time.monotonic_ns()))

    def released(self, slot: object, channel: str, side: str, item: int | None) -> None:
        """The slot is given back. Slots that overlap are no tree: those are drawn on tracks of their own."""
        stack = self._stacks.__dict__.setdefault("slots", [])
        at = next((i for i, (key, _) in enumerate(stack) if key == id(slot)), None)
        if at is None:
            return  # opened by another thread, or before the trace began
        nested = at == len(stack) - 1
        start = stack.pop(at)[1]
        args = {"side": side, "item": item}
        if nested:
            self.span("slot", channel, start, args=args)
        else:
            key = f"{channel}#{item}@{self.pid}"
            self._add(self._event("b", "slot", channel, start, id=key, args=args))
            self._add(self._event("e", "slot", channel, time.monotonic_ns(), id=key))

    def published(self, channel: str, item: int, at: int) -> None:
        """An arrow begins in the slot that is open on this thread now, at `at`: by now the item may be somewhere."""
        self._add(self._event("s", "hop", channel, at, id=f"{channel}#{item}"))

    def taken(self, slot: object, channel: str, item: int, published: int) -> None:
        """The item has hopped: it was published at `published` and is held in `slot` by this thread from now on."""
        self.opened(slot)
        now, id = time.monotonic_ns(), f"{channel}#{item}"
        self._add(self._event("b", "hop", channel, min(published, now), id=f"{id}@{self.pid}", args={"item": item}))
        self._add(self._event("e", "hop", channel, now, id=f"{id}@{self.pid}"))
        self._add(self._event("f", "hop", channel, now, id=id, bp="e"))

    def gpu(self, name: str, stream: Any, **args: Any) -> AbstractContextManager[None]:
        """The work that the block puts on `stream`, timed by the device; read once it is complete, nobody waits."""
        if self._gpu is None:
            from .trace_gpu import GpuSpans

            self._gpu = GpuSpans(self)
        return self._gpu.span(name, stream, args)

    def on_track(self, track: int, title: str, name: str, start: int, end: int, args: dict[str, Any]) -> None:
        """A span on a track that is no thread, such as a stream's."""
        if track not in self._threads:
            self._threads.add(track)
            self._add({"name": "thread_name", "ph": "M", "pid": self.pid, "tid": track, "args": {"name": title}})
        event = {"name": name, "cat": "gpu", "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3}
        self._add({**event, "pid": self.pid, "tid": track, "args": args})

    def _event(self, phase: str, category: str, name: str, at: int, **more: Any) -> dict[str, Any]:
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads.add(thread)
            title = {"name": threading.current_thread().name}
            self._add({"name": "thread_name", "ph": "M", "pid": self.pid, "tid": thread, "args": title})
        return {"name": name, "cat": category, "ph": phase, "ts": at / 1e3, "pid": self.pid, "tid": thread, **more}

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if len(self._events) >= _FLUSH_EVENTS or time.monotonic_ns() - self._written > _FLUSH_NS:
            self.flush()

    # -- the part file

    def flush(self) -> None:
        """Writes what was recorded so far."""
        import msgspec

        with self._lock:
            events, self._events = self._events, []
            self._written = time.monotonic_ns()
            if events and self._fd >= 0:
                _write_all(self._fd, b"".join(msgspec.json.encode(event) + b"\n" for event in events))

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
        self.flush()
        with self._lock:
            os.close(self._fd)
            self._fd = -1


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def start(parts: Path, process: str) -> Recorder:
    """This process records from now on, into a part of its own in the folder `parts`."""
    global ACTIVE
    stop()
    ACTIVE = Recorder(parts / f"{os.getpid()}-{time.monotonic_ns()}.part", process)
    return ACTIVE


def stop() -> None:
    """The process's part is complete; nothing more is recorded. Without a recorder it does nothing."""
    global ACTIVE
    recorder, ACTIVE = ACTIVE, None
    if recorder is not None:
        recorder.close()


def span(category: str, name: str, **args: Any) -> AbstractContextManager[None]:
    """``with trace.span("call", "edges"): ...``; for paths where a microsecond does not matter."""
    return _NOTHING if ACTIVE is None else _span(ACTIVE, category, name, args)


@contextmanager
def _span(recorder: Recorder, category: str, name: str, args: dict[str, Any]) -> Iterator[None]:
    began = time.monotonic_ns()
    try:
        yield
    finally:
        recorder.span(category, name, began, args=args)


def merge(parts: Iterable[Path], out: Path, **about: Any) -> int:
    """One trace of many parts, written whole under `out`; how many events it has. `about` goes in its ``otherData``.

    A line that a killed process did not finish is left out.
    """
    import msgspec

    partial = out.with_name(f".{out.name}.{os.getpid()}")
    count = 0
    try:
        with partial.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":%s,"traceEvents":[' % msgspec.json.encode(about))
            for part in parts:
                for line in part.read_bytes().split(b"\n"):
                    if line.endswith(b"}") and _whole(line):
                        file.write(b",\n" if count else b"\n")
                        file.write(line)
                        count += 1
            file.write(b"\n]}\n")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _whole(line: bytes) -> bool:
    import msgspec

    try:
        msgspec.json.decode(line, type=dict)
    except msgspec.DecodeError:
        return False
    return True


class Trace:
    """``session.trace("out.json")``: records this process from now on, until ``close()`` or the end of a ``with`` block
    writes the trace."""

    def __init__(self, out: str | os.PathLike[str], process: str) -> None:
        import tempfile

        self.out = Path(out)
        self._folder = tempfile.TemporaryDirectory(prefix="ipcsync-trace-")
        start(Path(self._folder.name), process)

    def close(self) -> None:
        """Writes the file; again does nothing."""
        stop()
        folder = Path(self._folder.name)
        if folder.exists():
            merge(sorted(folder.iterdir()), self.out)
            self._folder.cleanup()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
