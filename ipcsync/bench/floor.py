"""The floor in C (floor.cu): built with nvcc where there is one, and asked while Python's contestants stand ready."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("floor.cu")


class NoFloor(Exception):
    """Why the C floor is not there."""


def build(folder: Path) -> Path:
    """The program, built in `folder`."""
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if nvcc is None:
        raise NoFloor("no nvcc to build floor.cu with, neither on the PATH nor in /usr/local/cuda/bin")
    program = folder / "floor"
    command = [nvcc, "-O2", "-o", str(program), str(SOURCE), "-lcuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise NoFloor(f"nvcc did not build floor.cu: {(done.stderr or done.stdout).strip()[-500:]}")
    return program


class Floor:
    """The running program, which is two processes."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, kind: str, count: int, timeout: float = 30.0) -> float:
        """Microseconds of one of `count`; see floor.cu for the kinds."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{kind} {count}\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout)[0]:
            raise NoFloor(f"the C floor did not answer {kind!r} within {timeout:g} s")
        said = process.stdout.readline()
        if not said:
            raise NoFloor(f"the C floor ended with status {process.wait(5)}")
        return float(said)

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._process.kill()
            self._process.wait()
