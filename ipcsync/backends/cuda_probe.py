"""What is probed live rather than believed: stream memory operations, and how many blocked streams a process stands.

Both run on private streams over a private page, once a process and device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from typing import Any

from ..errors import IpcSyncError
from .cuda_driver import Devices, check

_GATE, _FIRST, _SECOND = 0, 8, 16  # words
_PATIENCE = 0.5  # seconds after which another stream counts as held back
_STUCK = 3.0  # seconds after which a trial is given up: a call of CUDA's has not returned
_TRIALS = 3


class Page:
    """A page of words that the device reaches, and streams to try it with. Made with a device current, once a process:
    taking a page back from CUDA waits for the device, and so for streams that wait for other processes."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        fd = os.memfd_create("ipcsync-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self.words = memoryview(self._map).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        check(driver.cuMemHostRegister(self.address, mmap.PAGESIZE, flags), "cuMemHostRegister")
        self.round = 0  # each trial's own value: words only grow
        self._streams: list[Any] = []

    def __enter__(self) -> Page:
        self.round += 1
        return self

    def __exit__(self, *_: object) -> None:
        """What waits is let go first, so that nothing here blocks."""
        self.let_go()
        for stream in self._streams:
            self._driver.cuStreamSynchronize(stream)
            self._driver.cuStreamDestroy(stream)
        self._streams.clear()

    def let_go(self) -> None:
        self.words[_GATE] = self.round

    @property
    def held(self) -> bool:
        return self.words[_GATE] < self.round

    def stream(self) -> Any:
        made = check(self._driver.cuStreamCreate(1), "cuStreamCreate")
        self._streams.append(made)
        return made

    def wait(self, stream: Any) -> None:
        address = self.address + 8 * _GATE
        check(self._driver.cuStreamWaitValue64(stream, address, self.round, 0), "cuStreamWaitValue64")

    def write(self, stream: Any, word: int) -> None:
        check(self._driver.cuStreamWriteValue64(stream, self.address + 8 * word, self.round, 0), "cuStreamWriteValue64")

    def reached(self, word: int, seconds: float = _PATIENCE) -> bool:
        until = time.monotonic() + seconds
        while self.words[word] < self.round:
            if time.monotonic() > until:
                return False
        return True


def expected_queues(devices: Devices, device: int) -> int:
    """What CUDA's documentation says of the process's hardware queues: where the probe begins."""
    asked = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if asked.isdecimal() and 1 <= int(asked) <= 32:
        return int(asked)
    return 2 if devices.attribute(device, "MPS_ENABLED") else 8


class Prober:
    """The probes of a process. The caller holds a lock."""

    def __init__(self, driver: Any, devices: Devices) -> None:
        self._driver, self._devices = driver, devices
        self._page: Page | None = None

    def _made(self) -> Page:
        if self._page is None:
            self._page = Page(self._driver)
        return self._page

    def memory_operations(self, device: int) -> str:
        """Why a real wait and write do not work here; empty when they do. The attribute may say no where they work."""
        try:
            with self._devices.using(device), self._made() as page:
                stream = page.stream()
                page.wait(stream)
                page.write(stream, _FIRST)
                time.sleep(0.002)
                if page.words[_FIRST] == page.round:
                    return "a stream passed a wait whose value had not been stored"
                page.let_go()
                if not page.reached(_FIRST):
                    return "a stream did not go on when the value it waits for was stored"
        except IpcSyncError as error:
            return str(error)
        return ""

    def hardware_queues(self, device: int) -> int:
        """C such that with C - 1 streams blocked, others were seen to go on, one at a time.

        Begins with the number expected: while that holds, the probe never stalls a stream of the caller's. The
        variable may have been set after CUDA read it, so a number that does not hold is halved.
        """
        queues, trials = expected_queues(self._devices, device), 0
        while queues > 1:
            stands = self._stands(device, queues - 1)
            if stands:
                return queues
            if stands is None:
                trials += 1
                if trials == _TRIALS:
                    return min(queues, 8)
            else:
                queues //= 2
        return queues

    def _stands(self, device: int, blocked: int) -> bool | None:
        """None: it could not be tried. Another library that frees memory or loads a kernel meanwhile waits for our
        blocked streams, and CUDA creates no stream until it is done: we let go then, or nobody would."""
        with self._devices.using(device), self._made() as page:
            giving_up = threading.Timer(_STUCK, page.let_go)
            giving_up.start()
            try:
                for _ in range(blocked):
                    page.wait(page.stream())
                for word in (_FIRST, _SECOND):
                    page.write(page.stream(), word)
                    if not page.reached(word):
                        return False if page.held else None
                return True if page.held else None
            finally:
                giving_up.cancel()
                giving_up.join()
