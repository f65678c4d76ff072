"""How long it takes to make a CUDA context, alone and with others: ``python -m tests.cuda.contexts`` (25 s at most).

With ``--most QUEUES...``: how many processes can have one at once, which is of interest under MPS.

By ``CUDA_DEVICE_MAX_CONNECTIONS``, one process after the other, then four at once; a process that has a context is
there all the time, so that the GPU itself is not started anew. Milliseconds: cuInit + cuDevicePrimaryCtxRetain /
release.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

QUEUES = (32, 1, 8)
SECONDS = 25.0  # in all
_MAKE = """
import ctypes, sys, time
clock, cuda = time.perf_counter, ctypes.CDLL("libcuda.so.1")
device, context, began = ctypes.c_int(), ctypes.c_void_p(), clock()
status = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
initialised = clock()
status = status or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
print(f"{1e3 * (initialised - began):.0f}+{1e3 * (clock() - initialised):.0f}", end="")
print(f" (error {status})" if status else "", flush=True)
sys.stdin.readline()
began = clock()
cuda.cuDevicePrimaryCtxRelease_v2(device)
print(f"{1e3 * (clock() - began):.0f}", flush=True)
"""


class Maker:
    """A process that makes a context, keeps it until it is told, and says how long both took."""

    def __init__(self, queues: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAKE],
            env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def made(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or "no context"

    def end(self) -> str:
        try:
            return self._process.communicate("\n", timeout=10)[0].strip() or "ended"
        except subprocess.TimeoutExpired:
            self.kill()
            return "stuck"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"contexts at {time.monotonic() - began:4.1f} s: {text}", flush=True)

    keeper = Maker(1)
    say(f"the first of all, 1 queue: {keeper.made()} ms")
    for _ in range(3):
        for queues in QUEUES:
            if time.monotonic() - began < SECONDS / 2:
                maker = Maker(queues)
                say(f"alone, {queues} queues: {maker.made()} / {maker.end()} ms")
    for queues in QUEUES:
        if time.monotonic() - began < SECONDS - 5:
            makers = [Maker(queues) for _ in range(4)]
            made = [maker.made() for maker in makers]
            say(f"four at once, {queues} queues: {'  '.join(made)} / {'  '.join(maker.end() for maker in makers)} ms")
    keeper.end()


def most(*queues_of_each: int, limit: int = 48) -> None:
    """Processes one after the other, until one gets no context."""
    for queues in queues_of_each:
        makers: list[Maker] = []
        answer = "they all did"
        while len(makers) < limit:
            makers.append(Maker(queues))
            answer = makers[-1].made()
            if "error" in answer or answer == "no context":
                break
        print(f"{queues} queues: {len(makers) - 1} processes have a context, and of the next: {answer}", flush=True)
        for maker in makers:
            maker.kill()


if __name__ == "__main__":
    most(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["--most"] else main()
