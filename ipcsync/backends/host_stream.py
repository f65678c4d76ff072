"""A stream of the host: a daemon thread that does what it is given, in order.

The thread holds no reference to the :class:`HostStream`: when the last holder lets that go, the thread does what is
left and ends. Nothing here takes a lock that could be held already when the garbage collector or a signal handler
comes in between (``SimpleQueue`` and ``deque`` are made for that).
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ..errors import ForkedProcess, InvalidState, StreamFailed

Failed = Callable[[BaseException], object]
_Work = tuple[Callable[..., object], tuple[Any, ...], Failed | None]


_numbers = itertools.count(1)


class _State:
    """What a stream and its thread share."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.left: deque[None] = deque()  # one entry for each piece of work that is not done
        self.error: BaseException | None = None
        self.ident = 0


def _run(state: _State) -> None:
    state.ident = threading.get_ident()
    get, done = state.queue.get, state.left.pop
    while (work := get()) is not None:
        fn, args, failed = work
        if state.error is None:
            try:
                fn(*args)
            except BaseException as error:  # SystemExit too: it ends the stream's work, not the process
                state.error = error
        elif failed is not None:
            try:
                failed(state.error)
            except BaseException as error:
                state.error.add_note(f"and telling who waits for it raised {error!r}")
        del work, fn, args, failed  # while it waits for more, the thread keeps nothing alive
        done()


class HostStream:
    """The queue. Thread-safe; of no use in a forked child, where its thread does not exist."""

    def __init__(self) -> None:
        self.number = next(_numbers)  # never given again in this process, as an address would be
        self._state = _State()
        self._pid = os.getpid()
        threading.Thread(target=_run, args=(self._state,), name="ipcsync-stream", daemon=True).start()

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None:
            state.queue.put(None)

    def put(self, fn: Callable[..., object], args: tuple[Any, ...], failed: Failed | None = None) -> None:
        """Has the thread call ``fn(*args)`` after all that it was given before; or, once a call raised (`fn` itself
        does not count), ``failed(error)``."""
        self._unforked()
        self._state.left.append(None)
        self._state.queue.put((fn, args, failed))

    def _unforked(self) -> None:
        if self._pid != os.getpid():
            raise ForkedProcess(
                "this stream's thread stayed in the parent process: make a new Stream here, or start children with "
                'multiprocessing\'s "spawn" method'
            )

    def check(self) -> None:
        """Raises what ended the stream's work, if anything did."""
        self._unforked()
        error = self._state.error
        if error is not None:
            raise StreamFailed(
                f"work on this stream raised {error!r}: the stream takes no more; make a new one", error=repr(error)
            ) from error

    def idle(self) -> bool:
        """Whether everything it was given is done."""
        return not self._state.left

    def synchronize(self) -> None:
        """Returns once all that was given before this call is done; raises what a call of it raised."""
        self._unforked()
        if self._state.left:
            if self._state.ident == threading.get_ident():
                raise InvalidState("a call enqueued on a stream waits for that stream: it would wait for itself")
            if sys.is_finalizing():
                raise InvalidState("the interpreter is exiting and its stream threads have ended: synchronize before")
            passed = threading.Lock()
            passed.acquire()
            self.put(passed.release, (), lambda _: passed.release())
            passed.acquire()
        self.check()
