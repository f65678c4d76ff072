"""What a slot holds: named fields of a greatest shape and a dtype, laid out in a buffer at multiples of 256 bytes.

256 because CUDA's own allocations are aligned so: every field of every buffer is as well aligned as memory of its own.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .dtypes import dtype_name, itemsize
from .errors import InvalidArgument
from .wire import FieldSpec

ALIGNMENT = 256
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,120}")
SINGLE = "array"  # the name of the one field of a channel made with shape= and dtype=


class Field:
    """One field of a channel's slots or of a shared array: its greatest shape (elements an axis) and its dtype.

    An item may be smaller (``slot.resize``). ``()`` is one element. ``dtype`` is a name (``"float32"``,
    ``"bfloat16"``), a numpy, cupy, ml_dtypes or torch dtype, or a Python type.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: int | Iterable[int], dtype: Any = "float32") -> None:
        self.shape = shape_of(shape)
        self.dtype = dtype_name(dtype)
        if 0 in self.shape:
            raise InvalidArgument(f"a field of shape {self.shape} holds nothing: every axis is at least 1")
        if len(self.shape) > 16:
            raise InvalidArgument(f"a field has at most 16 axes, not {len(self.shape)}")
        if self.nbytes >= 1 << 47:
            raise InvalidArgument(f"a field of shape {self.shape} and {self.dtype} has {self.nbytes} bytes: too many")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole field."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"Field({self.shape}, {self.dtype!r})"


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints >= 0; an int is one axis."""
    try:
        axes = (
            tuple(operator.index(axis) for axis in shape) if isinstance(shape, Iterable) else (operator.index(shape),)
        )
    except TypeError:
        raise InvalidArgument(f"shape {shape!r} is no tuple of integers") from None
    if any(axis < 0 for axis in axes):
        raise InvalidArgument(f"shape {axes} has a negative axis")
    return axes


def layout(fields: Mapping[str, Field]) -> tuple[tuple[FieldSpec, ...], int]:
    """(the fields with their offsets in a buffer, bytes of one buffer), in the order given."""
    if not fields:
        raise InvalidArgument("fields is empty: give at least one Field")
    specs, offset = [], 0
    for name, field in fields.items():
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"field name {name!r}: use 1 to 120 letters, digits, '_', '.' and '-'")
        if not isinstance(field, Field):
            raise InvalidArgument(f"fields[{name!r}] is {field!r}: give a Field(shape, dtype)")
        specs.append(FieldSpec(name=name, shape=field.shape, dtype=field.dtype, offset=offset))
        offset += (field.nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return tuple(specs), offset


def fields_of(fields: Mapping[str, Any] | None, shape: Any, dtype: Any) -> tuple[dict[str, Field], bool]:
    """The fields that ``fields=`` or else ``shape=`` and ``dtype=`` describe, and whether it was the latter."""
    if (fields is None) == (shape is None):
        raise InvalidArgument("give either shape= (with dtype=) or fields={name: Field(shape, dtype)}")
    if fields is None:
        return {SINGLE: Field(shape, dtype)}, True
    return dict(fields), False
