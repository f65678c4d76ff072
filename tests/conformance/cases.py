"""What the rules need of a device, the same on every backend: a :class:`Case`.

A new backend runs the rules on itself from a test module of its own. What it does differently stands in a class at the
top of that module, because children make it again by its name::

    from tests.conformance.cases import Case, cases
    from tests.conformance.test_event import *  # the rules: test_event, test_event_processes, test_channels, ...

    class MyCase(Case): ...  # `hold`, `fill`, `array`, ...: where the ways of the CPU are not its own
    case = cases(lambda: MyCase("mydevice"))  # in the place of the fixture that came with the rules
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest

import ipcsync
from ipcsync.shm import Region
from ipcsync.stream import resolve

from ..harness import TIMEOUT, Gate


class WordGate:
    """A gate for a CUDA stream: a wait of the device on a word, which `open` stores."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        from ipcsync.backends import select

        self._backend = select.backend("cuda")
        path = Path(os.environ["IPCSYNC_RUNTIME_DIR"]) / f"gate-{secrets.token_hex(4)}"
        self._region = Region.create(path, 4096)
        path.unlink()
        self._backend.register(self._region)
        self._backend.wait(resolve(stream, stream.device), self._region, 0, 1)

    def open(self) -> None:
        self._region.words[0] = 1


@cache
def _warm() -> None:
    """Loading a kernel waits for the device, and so for a held stream, with a lock that every launch needs: what the
    rules compute with is loaded before anything is held."""
    import cupy

    for dtype in ("int32", "int64", "uint8", "int8", "float32", "float64"):
        array = cupy.zeros((4, 8), dtype)
        array[...] = 1
        array[1:, 2:] = 2
        copy = cupy.empty_like(array)
        cupy.copyto(copy, array)
        copy[:, ::2] = array[:, ::2]
        copy += 1
        (copy == array).all().get()
        (array == 1).all().get()
        array.sum().get()
        cupy.asarray([1, 2], dtype=dtype).get()
    cupy.cuda.get_current_stream().synchronize()


class Case:
    """A device: new streams, something that holds one of them, arrays that can be exported. Made anew in children."""

    made: ClassVar[list[Case]] = []  # those not closed yet: a child that serves another test closes them first

    def __init__(self, device: str) -> None:
        self.device = device
        self.made.append(self)
        self._gates: list[Gate | WordGate] = []
        self._files: list[Path] = []
        if device != "cpu":
            _warm()

    @property
    def xp(self) -> Any:
        if self.device == "cpu":
            return numpy
        import cupy

        return cupy

    def stream(self) -> ipcsync.Stream:
        return ipcsync.Stream(self.device)

    def array(self, values: Any, dtype: str) -> Any:
        return self.xp.asarray(values, dtype=dtype)

    def fill(self, stream: ipcsync.Stream, array: Any, value: int) -> None:
        """Writes `value` all over `array` when the stream gets there."""
        stream.enqueue(array.__setitem__, ..., value)

    def copy_later(self, stream: ipcsync.Stream, array: Any) -> Any:
        """What `array` holds when the stream gets there, in a new array."""
        copy = self.xp.empty_like(array, order="C")
        stream.enqueue(self.xp.copyto, copy, array)
        return copy

    def hold(self, stream: ipcsync.Stream) -> Gate | WordGate:
        """Holds the stream until the gate is opened (or the process ends)."""
        if self.device != "cpu":
            held = WordGate(stream)
            self._gates.append(held)
            return held
        gate = Gate()
        self._gates.append(gate)
        stream.enqueue(gate.hold)
        assert gate.reached.wait(TIMEOUT)
        return gate

    def exportable(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A zeroed array that `share` accepts, owned by the test."""
        if self.device != "cpu":
            return self.xp.zeros(shape, dtype)
        path = Path(os.environ["IPCSYNC_RUNTIME_DIR"]) / f"test-{len(self._files)}"
        self._files.append(path)
        count = int(numpy.prod(shape))
        with path.open("w+b") as file:
            file.truncate(max(1, count * numpy.dtype(dtype).itemsize))
            mapped = mmap.mmap(file.fileno(), 0)
        return numpy.frombuffer(mapped, dtype, count).reshape(shape)

    def close(self) -> None:
        if self in self.made:
            self.made.remove(self)
        for gate in self._gates:
            gate.open()
        for path in self._files:
            path.unlink(missing_ok=True)


def cases(*make: Any, ids: tuple[str, ...] | None = None) -> Any:
    """A ``case`` fixture over these (functions that make a :class:`Case`, or ``pytest.param`` of them)."""

    @pytest.fixture(params=make, ids=ids, name="case")
    def case(request: pytest.FixtureRequest, runtime: Path) -> Iterator[Case]:
        made = request.param()
        yield made
        made.close()

    return case


case = cases(lambda: Case("cpu"), pytest.param(lambda: Case("cuda"), marks=pytest.mark.cuda), ids=("host", "cuda"))
