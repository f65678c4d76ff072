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

Each runs in a process of its own. When ``read`` returns its channel ends, ``edges`` reads it to the end and returns,
and so on: a pipeline ends by itself. :func:`ipcsync_workers.testing.run_stage` runs one without a broker.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ipcsync import trace
from ipcsync.errors import InvalidState

from .calls import PER_ITEM

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


class Sink(Protocol):
    """What a stage writes: a :class:`~ipcsync_workers.ports.Output`, or a list that grows in a test."""

    def slot(
        self, *, meta: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> AbstractContextManager[Any]: ...


class Stage:
    """What a stage function is given.

    ``name``      the stage's name in pipeline.toml
    ``inputs``    by channel name; ``input`` is the only one
    ``outputs``   by channel name; ``output`` is the only one
    ``params``    the table ``params`` of pipeline.toml
    ``device``    an ``ipcsync.Device``; ``xp`` is numpy on the cpu and cupy on a GPU
    ``stream``    the stage's stream on that device, current while the stage runs
    ``session``   its ``ipcsync.Session``, in the namespace of this run; None in ``run_stage``
    ``draining``  True once the run was asked to end: a source that waits for something else than ``slot()`` looks here
    ``counts``    what :meth:`count` counted
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
    ) -> None:
        self.name, self.params, self.device, self.stream, self.session = name, params, device, stream, session
        self.inputs: dict[str, Slots] = {}
        self.outputs: dict[str, Sink] = {}
        self.draining = False
        self.counts: Counter[str] = Counter()
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

    def to_host(self, array: Any) -> Any:
        """The array as numpy has it: itself on the cpu, a finished copy from a GPU."""
        return array if self.device.type == "cpu" else self.xp.asnumpy(array)

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
            with trace.span("call", stage.name):
                returned = function(_content(slot), _content(out), out.meta, **keywords)
            if returned is not None:
                raise TypeError(
                    f"{function.__name__} returned a {type(returned).__name__}: a per_item function fills `out` in "
                    "place (out[...] = result) and returns nothing"
                )


def _content(slot: Any) -> Any:
    return slot.array if len(slot) == 1 else slot
