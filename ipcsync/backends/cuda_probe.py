"""What is probed live rather than believed: stream memory operations, and how many blocked streams a process stands.

Both run on private streams over a private page, once a process and device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from contextlib import ExitStack
from typing import Any

from .cuda_driver import Devices, check

_PATIENCE = 0.5  # seconds after which another stream counts as held back


class Page:
    """A page of words that the device reaches, and streams to try it with. Made with the device current."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        fd = os.memfd_create("ipcsync-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self.words = memoryview(self._map).cast("Q")
        self._byte = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._byte)
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        check(driver.cuMemHostRegister(self.address, mmap.PAGESIZE, flags), "cuMemHostRegister")
        self._streams: list[Any] = []

    def stream(self) -> Any:
        made = check(self._driver.cuStreamCreate(1), "cuStreamCreate")
        self._streams.append(made)
        return made

    def wait(self, stream: Any, word: int, value: int) -> None:
        check(self._driver.cuStreamWaitValue64(stream, self.address + 8 * word, value, 0), "cuStreamWaitValue64")

    def write(self, stream: Any, word: int, value: int) -> None:
        check(self._driver.cuStreamWriteValue64(stream, self.address + 8 * word, value, 0), "cuStreamWriteValue64")

    def reaches(self, word: int, value: int, seconds: float = _PATIENCE) -> bool:
        until = time.monotonic() + seconds
        while self.words[word] < value:
            if time.monotonic() > until:
                return False
        return True

    def close(self) -> None:
        """Everything that waits is let go first, so that nothing here blocks."""
        for word in range(len(self.words)):
            self.words[word] = 2**63 - 1
        for stream in self._streams:
            self._driver.cuStreamSynchronize(stream)
            self._driver.cuStreamDestroy(stream)
        self._driver.cuMemHostUnregister(self.address)
        del self._byte
        self.words.release()
        self._map.close()


def memory_operations(driver: Any, devices: Devices, device: int) -> str:
    """Why a real wait and write do not work here; empty when they do. The attribute may say no where they work."""
    with devices.using(device), ExitStack() as stack:
        try:
            page = Page(driver)
            stack.callback(page.close)
            stream = page.stream()
            page.wait(stream, 0, 5)
            page.write(stream, 8, 7)
        except Exception as error:
            return str(error)
        time.sleep(0.002)
        if page.words[8]:
            return "a stream passed a wait whose value had not been stored"
        page.words[0] = 5
        if not page.reaches(8, 7):
            return "a stream did not go on when the value it waits for was stored"
    return ""


def expected_queues(devices: Devices, device: int) -> int:
    """What CUDA's documentation says of the process's hardware queues: where the probe begins."""
    asked = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if asked.isdecimal() and 1 <= int(asked) <= 32:
        return int(asked)
    return 2 if devices.attribute(device, "MPS_ENABLED") else 8


def hardware_queues(driver: Any, devices: Devices, device: int) -> int:
    """C such that with C - 1 streams blocked, others were seen to go on, one at a time.

    Begins with the number expected: while that holds, the probe never stalls a stream of the caller's. The variable
    may have been set after CUDA read it, so a number that does not hold is halved.
    """
    queues = expected_queues(devices, device)
    while queues > 1 and not _stands(driver, devices, device, queues - 1):
        queues //= 2
    return queues


def _stands(driver: Any, devices: Devices, device: int, blocked: int) -> bool:
    with devices.using(device):
        page = Page(driver)
        try:
            for _ in range(blocked):
                page.wait(page.stream(), 0, 1)
            for word in (8, 16):
                page.write(page.stream(), word, 1)
                if not page.reaches(word, 1):
                    return False
            return True
        finally:
            page.close()
