"""Running one stage without a broker, a channel or another process: for unit tests of stages.

::

    def test_edges_of_a_flat_picture_are_black():
        [edges] = run_stage(stages.edges, inputs=[np.full((8, 8, 3), 100, np.uint8)])
        assert not edges.array.any()
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ipcsync.errors import EndOfStream, InvalidState

from .stage import Sink, Slots, Stage, run


@dataclass
class Item:
    """One item: ``array`` (or ``item["field"]``), ``meta``, ``number`` (from 1)."""

    value: Any
    meta: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    previous: int = 0
    discarded: bool = False

    @property
    def array(self) -> Any:
        if isinstance(self.value, Mapping):
            raise InvalidState(f"this item has fields {', '.join(self.value)}: use slot[name]")
        return self.value

    def __getitem__(self, name: str) -> Any:
        return self.value[name] if isinstance(self.value, Mapping) else self.value

    def __len__(self) -> int:
        return len(self.value) if isinstance(self.value, Mapping) else 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.value if isinstance(self.value, Mapping) else ("array",))

    def resize(self, *what: Any) -> None:
        """``resize(name, shape)``, or ``resize(shape)`` of the one field: this item's extent, at most what it was."""
        name, shape = what if len(what) == 2 else ("array", what[0])
        smaller = tuple(slice(0, extent) for extent in shape)
        if isinstance(self.value, Mapping):
            self.value = {**self.value, name: self.value[name][smaller]}
        else:
            self.value = self.value[smaller]

    def discard(self) -> None:
        """As if it had never been."""
        self.discarded = True

    def confirm(self) -> None:
        """Nothing here can be unfinished."""

    def release(self) -> None:
        """Nothing waits for it here."""


class _Any:
    """An output whose shape nobody said: takes whatever is assigned to the whole of it."""

    value: Any = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is not Ellipsis and key != slice(None):
            raise InvalidState(
                "only out[...] = result works on an output without a shape: pass run_stage(..., output=array_like)"
            )
        self.value = copy.deepcopy(value)


class _Inputs:
    def __init__(self, items: Iterable[Any]) -> None:
        self._items = [_item(each, number) for number, each in enumerate(items, start=1)]
        self._next = 0

    def slots(self, *, timeout: float | None = None) -> Iterator[Item]:
        while self._next < len(self._items):
            with self.get() as item:
                yield item

    @contextmanager
    def get(self, *, timeout: float | None = None) -> Iterator[Item]:
        yield self.take()

    def take(self, *, timeout: float | None = None) -> Item:
        if self._next == len(self._items):
            raise EndOfStream("every input that the test gave was read")
        self._next += 1
        return self._items[self._next - 1]

    def finish(self) -> None:
        """Nothing is given back here."""

    @property
    def finished(self) -> int:
        return self._next


class _Outputs:
    def __init__(self, like: Any, before: int) -> None:
        self._like, self._before = like, before
        self.items: list[Item] = []

    @property
    def written(self) -> int:
        return self._before + len(self.items)

    @contextmanager
    def slot(self, *, meta: Mapping[str, Any] | None = None, timeout: float | None = None) -> Iterator[Item]:
        # The buffer is the test's own array, copied: whatever it holds before shows an output not filled whole.
        value = _Any() if self._like is None else copy.deepcopy(self._like)
        item = Item(value, dict(meta or {}), len(self.items) + 1)
        yield item
        if not item.discarded:
            item.value = item.value.value if isinstance(item.value, _Any) else item.value
            self.items.append(item)


def _item(given: Any, number: int) -> Item:
    array, meta = given if isinstance(given, tuple) else (given, {})
    if hasattr(array, "flags") and hasattr(array.flags, "writeable"):
        array = array.view()
        array.flags.writeable = False  # as a stage gets it
    return Item(array, dict(meta), number)


def run_stage(
    function: Callable[..., Any],
    inputs: Iterable[Any] | Mapping[str, Iterable[Any]] = (),
    *,
    output: Any = None,
    outputs: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    resumed_at: int = 0,
) -> Any:
    """Runs a stage function to its end and returns what it wrote.

    `inputs` are the items of its input: arrays, or ``(array, meta)``; a map of such lists where it has several. An
    item of a channel with fields is a map of arrays. `output` is an array (or map of arrays) like the output's buffer;
    without it, ``out[...] = result`` takes any shape. `outputs` names several, and then the result is a map too.
    `resumed_at`: as for a source that was started again when it had published so many; those are not in the result.
    Returns a list of :class:`Item`, each with ``array``, ``meta`` and ``number``.
    """
    from ipcsync.device import as_device

    name = getattr(function, "__name__", "stage")
    stage = Stage(name, params=dict(params or {}), device=as_device(device), restarts=int(resumed_at > 0))
    stage.resumed_at = resumed_at
    given = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    sources: dict[str, Slots] = {name: _Inputs(items) for name, items in given.items()}
    stage.inputs = sources
    made = {name: _Outputs(like, resumed_at) for name, like in (outputs or {"output": output}).items()}
    sinks: dict[str, Sink] = dict(made.items())
    stage.outputs = sinks
    run(function, stage)
    return {name: each.items for name, each in made.items()} if outputs else made["output"].items
