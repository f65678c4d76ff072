"""What a user writes a stage with: :class:`Stage`, and :func:`per_item` for the commonest kind.

A stage is a plain function in a module beside pipeline.toml, which names it (``call = "stages:edges"``)::

    from ipcsync_workers import Stage, per_item

    def read(stage: Stage) -> None:                      # a source: no input
        for path in sorted(Path(stage.params["folder"]).iterdir()):
            with stage.output.slot(meta={"name": path.name}) as slot:
                slot.array[...] = decode(path)

    @per_item
    def edges(array, out, meta, *, xp, strength=1.0):    # one item in, one out
        out[...] = xp.clip(array.mean(axis=2) * strength, 0, 255)

    def write(stage: Stage) -> None:                     # a sink: no output
        for slot in stage.input.slots():
            save(stage.to_host(slot.array), slot.meta["name"])

A stage with several inputs takes them in step, or whichever has something::

    def join(stage):
        for left, right in stage.step("left", "right"):
            with stage.output.slot() as out: ...

    def merge(stage):
        for name, slot in stage.each(): ...

Each runs in a process of its own. When ``read`` returns its channel ends, ``edges`` reads it to the end and returns,
and so on: a pipeline ends by itself. :func:`ipcsync_workers.testing.run_stage` runs one without a broker.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ipcsync import trace
from ipcsync.errors import EndOfStream, InvalidState, WaitTimeout

from .calls import PER_ITEM
from .order import Made

F = TypeVar("F", bound=Callable[..., None])
P = TypeVar("P")


class Drained(BaseException):
    """Raised in a source by ``slot()`` once the run is asked to end: let it pass, the stage is finished.

    Not an ``Exception``, so that ``except Exception`` around a bad input does not swallow it.
    """


class Slots(Protocol):
    """What a stage reads: a :class:`~ipcsync_workers.ports.Input`, or a list of arrays in a test."""

    def slots(self, *, timeout: float | None = None) -> Iterator[Any]: ...
    def get(self, *, timeout: float | None = None) -> AbstractContextManager[Any]: ...
    def take(self, *, timeout: float | None = None) -> Any: ...
    def finish(self) -> None: ...
    @property
    def finished(self) -> int: ...


class Sink(Protocol):
    """What a stage writes: a :class:`~ipcsync_workers.ports.Output`, or a list that grows in a test."""

    def slot(
        self, *, meta: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> AbstractContextManager[Any]: ...
    @property
    def written(self) -> int: ...


class Stage:
    """What a stage function is given.

    - ``name``: the stage's name in pipeline.toml
    - ``inputs``: by channel name; ``input`` is the only one
    - ``outputs``: by channel name; ``output`` is the only one
    - ``params``: the table ``params`` of pipeline.toml
    - ``device``: an ``ipcsync.Device``; ``xp`` is numpy on the cpu and cupy on a GPU
    - ``stream``: the stage's stream on that device, current while the stage runs
    - ``session``: its ``ipcsync.Session``, in the namespace of this run; None in ``run_stage``
    - ``draining``: True once the run was asked to end: a source that waits for something else than ``slot()`` looks
      here
    - ``counts``: what :meth:`count` counted
    - ``restarts``: how often it was started again: 0 in its first life
    - ``resumed_at``: how many items it had published by then (of several outputs, the fewest; all: ``output.written``).
      A source goes on from here; it is exact, however the stage died
    """

    def __init__(
        self,
        name: str,
        *,
        params: Mapping[str, Any],
        device: Any,
        stream: Any = None,
        session: Any = None,
        expected: Callable[[int], None] = lambda _: None,
        restarts: int = 0,
    ) -> None:
        self.name, self.params, self.device, self.stream, self.session = name, params, device, stream, session
        self.inputs: dict[str, Slots] = {}
        self.outputs: dict[str, Sink] = {}
        self.draining = False
        self.counts: Counter[str] = Counter()
        self.restarts, self.resumed_at = restarts, 0
        self.leaving: threading.Event | None = None  # run by hand: set when it is to take nothing more
        self.made: Made | None = None  # of which item what it writes now is made
        self.arrived: Callable[[Sequence[Any], float | None], Sequence[Any]] = lambda inputs, _: inputs
        self._expected = expected

    @property
    def input(self) -> Slots:
        """The stage's only input."""
        return _only(self.inputs, self.name, "input")

    @property
    def output(self) -> Sink:
        """The stage's only output."""
        return _only(self.outputs, self.name, "output")

    @property
    def xp(self) -> Any:
        """The array module of the stage's device: numpy or cupy. Code written with it runs on both."""
        if self.device.type == "cpu":
            import numpy

            return numpy
        import cupy

        return cupy

    def step(self, *names: str, timeout: float | None = None, strict: bool = True) -> Iterator[tuple[Any, ...]]:
        """The inputs in step: the first item of each, then the second of each, and so on, as a tuple of slots.

        `names`: which inputs, in which order; without: all, in the order of the file. Ends when one has ended; if
        others have more, that is ``InvalidState``, unless the run is being ended or ``strict=False``. `timeout` is per
        item. The slots are the stage's until the next turn.
        """
        inputs = [self._input(name) for name in names or self.inputs]
        turn = max((each.finished for each in inputs), default=0)
        if self.restarts:  # killed when it had given back one item of a step and not yet the others
            for each in inputs:
                while each.finished < turn:
                    each.take(timeout=timeout)
                    each.finish()
        while True:
            for each in inputs:
                each.finish()
            slots = []
            ended = []
            for name, each in zip(names or self.inputs, inputs, strict=True):
                try:
                    slots.append(each.take(timeout=timeout))
                except EndOfStream:
                    ended.append(name)
                    if not strict:
                        break
            if ended:
                if slots and strict and not self.draining:
                    raise InvalidState(
                        f"stage {self.name!r}: {', '.join(map(repr, ended))} ended after {turn} items and other inputs "
                        "have more; if that is right, take them with stage.step(strict=False)"
                    )
                return
            turn += 1
            self.made = Made(turn, turn - 1)
            yield tuple(slots)

    def each(self, *names: str, timeout: float | None = None) -> Iterator[tuple[str, Any]]:
        """Whichever input has something: ``(name, slot)``, until all have ended. None is kept waiting by a busier one.

        `names`: which inputs; without: all. `timeout`: seconds that the next item of any may take to come. The slot is
        the stage's until the next turn.
        """
        open_ = {name: self._input(name) for name in names or self.inputs}
        while open_:
            ready = list(self.arrived(list(open_.values()), timeout))
            if not ready:
                told = f"stage {self.name!r}: none of {', '.join(map(repr, open_))} had an item within {timeout:g} s"
                raise WaitTimeout(told, timeout=timeout or 0.0)
            for name, each in [(name, each) for name, each in open_.items() if each in ready]:
                try:
                    slot = each.take(timeout=0)
                except WaitTimeout:
                    continue
                except EndOfStream:
                    del open_[name]
                    continue
                yield name, slot
                each.finish()

    def _input(self, name: str) -> Slots:
        if name not in self.inputs:
            known = ", ".join(map(repr, self.inputs)) or "none"
            raise InvalidState(f"stage {self.name!r} has no input {name!r}; it has {known}")
        return self.inputs[name]

    def is_here(self, array: Any) -> bool:
        """Whether the array is on the stage's own device, so that ``xp`` can work on it as it is."""
        if hasattr(array, "__cuda_array_interface__"):
            return bool(self.device.type == "cuda" and array.device.id == self.device.index)
        return self.device.type == "cpu" or not hasattr(array, "__array_interface__")

    def here(self, array: Any) -> Any:
        """The array on the stage's own device: itself if it is there, else a copy. A channel's device is its own, so a
        stage that lives elsewhere (``device``) copies what it takes; ``put`` is the way back."""
        if self.is_here(array):
            return array
        if self.device.type == "cpu":
            return self.to_host(array)
        # A copy of another GPU's array is made on the current device.
        return array.copy() if hasattr(array, "__cuda_array_interface__") else self.xp.asarray(array)

    def put(self, out: Any, array: Any) -> None:
        """``out[...] = array``, wherever the two are: for an output channel that is not on the stage's device."""
        if not hasattr(out, "__cuda_array_interface__"):
            out[...] = self.to_host(array)
            return
        import cupy

        on_gpu = hasattr(array, "__cuda_array_interface__")
        if on_gpu and array.device != out.device and self.stream is not None:
            self.stream.synchronize()  # the copy is made on the channel's stream, which knows nothing of ours
        with out.device:
            if not on_gpu:
                out[...] = cupy.asarray(array)
            else:
                out[...] = array if array.device == out.device else array.copy()

    def to_host(self, array: Any) -> Any:
        """The array as numpy has it: itself on the cpu, a finished copy from a GPU."""
        if not hasattr(array, "__cuda_array_interface__"):
            return array
        import cupy

        with array.device:
            return cupy.asnumpy(array)

    def expect(self, items: int) -> None:
        """Says how many items this stage will make, for the progress bars."""
        self._expected(items)

    def count(self, what: str, n: int = 1) -> None:
        """Counts something of the stage's own, such as files passed over: the closing table has it."""
        self.counts[what] += n


def _only(ports: Mapping[str, P], stage: str, side: str) -> P:
    if len(ports) != 1:
        names = ", ".join(map(repr, ports)) or "none"
        raise InvalidState(f"stage {stage!r} has {len(ports)} {side}s ({names}): take one by name, stage.{side}s[...]")
    return next(iter(ports.values()))


def per_item(function: F) -> F:
    """Marks a function of one item: ``def edges(array, out, meta): ...``.

    For each item of the stage's one input it is called with ``array`` (the item, read-only on the cpu), ``out`` (a
    buffer of the one output, to be filled in place) and ``meta`` (the item's map; what is changed in it goes on with
    ``out``). Of a channel with several fields it gets the slots: ``array["ids"]``. Keyword-only arguments are filled
    in: ``xp`` (numpy or cupy), ``stage`` (the :class:`Stage`), and the rest from ``params`` of pipeline.toml, where a
    name that the function does not take is a mistake. The function stays what it was: a test calls it with arrays.
    """
    setattr(function, PER_ITEM, True)
    return function


def run(function: Callable[..., Any], stage: Stage) -> None:
    """Runs a stage function to its end; a source that was drained ends like one that returned."""
    try:
        if getattr(function, PER_ITEM, False):
            _each(function, stage)
        else:
            function(stage)
    except Drained:
        if not stage.draining:
            raise


def _each(function: Callable[..., Any], stage: Stage) -> None:
    parameters = inspect.signature(function).parameters.values()
    wanted = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    keywords = {name: value for name, value in (("xp", stage.xp), ("stage", stage)) if name in wanted}
    keywords |= stage.params
    source, sink = stage.input, stage.output
    for slot in source.slots():
        with sink.slot(meta=slot.meta) as out:
            array, buffer = _local(stage, slot), _local(stage, out)
            with trace.span("call", stage.name):
                returned = function(_content(array), _content(buffer), out.meta, **keywords)
            if returned is not None:
                raise TypeError(
                    f"{function.__name__} returned a {type(returned).__name__}: a per_item function fills `out` in "
                    "place (out[...] = result) and returns nothing"
                )
            if buffer is not out:
                for name in buffer:
                    stage.put(out[name], buffer[name])


def _local(stage: Stage, slot: Any) -> Any:
    """The slot, or copies of its arrays where its channel is not on the stage's device."""
    if all(stage.is_here(slot[name]) for name in slot):
        return slot
    return {name: stage.here(slot[name]) for name in slot}


def _content(slot: Any) -> Any:
    if len(slot) != 1:
        return slot
    return next(iter(slot.values())) if isinstance(slot, dict) else slot.array
