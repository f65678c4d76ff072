"""Data types by name: those of numpy that mean the same everywhere, and bfloat16 and the float8 kinds of ml_dtypes.

On the wire a dtype is its name (``"uint8"``, ``"bfloat16"``). ml_dtypes is loaded only when such an array is looked at:
a broker that hands out the memory of a bfloat16 channel needs no ml_dtypes, and its size is known without.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    import numpy

_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_ML_SIZES = {
    "bfloat16": 2, "float8_e3m4": 1, "float8_e4m3": 1, "float8_e4m3b11fnuz": 1, "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
NAMES = (*_SIZES, *_ML_SIZES)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as a name, a numpy, cupy, ml_dtypes or torch dtype, or a Python type.

    ``InvalidArgument`` for what means nothing fixed in another process: objects, strings, dates, swapped bytes.
    """
    name = dtype if isinstance(dtype, str) else str(dtype)
    name = name.removeprefix("torch.")
    if name in _SIZES or name in _ML_SIZES:
        return name
    import numpy

    try:
        found = numpy.dtype(dtype)
    except TypeError:
        raise InvalidArgument(f"dtype {dtype!r} is none of {', '.join(NAMES)}") from None
    if not found.isnative or found.name not in (*_SIZES, *_ML_SIZES):
        raise InvalidArgument(f"dtype {dtype!r} cannot be shared: use one of {', '.join(NAMES)}")
    return str(found.name)


def itemsize(name: str) -> int:
    """Bytes of one element of a dtype's name; ``InvalidArgument`` for an unknown one."""
    size = _SIZES.get(name) or _ML_SIZES.get(name)
    if size is None:
        raise InvalidArgument(f"dtype {name!r} is none of {', '.join(NAMES)}")
    return size


@cache
def numpy_dtype(name: str) -> numpy.dtype[Any]:
    """The numpy dtype (cupy's is the same) of a name; ``Unsupported`` when it needs ml_dtypes and that is missing."""
    import numpy

    if name in _SIZES:
        return numpy.dtype(name)
    itemsize(name)
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported(f"arrays of {name} need ml_dtypes: pip install ml_dtypes") from None
    kind = getattr(ml_dtypes, name, None)
    if kind is None:
        raise Unsupported(f"this ml_dtypes has no {name}: pip install --upgrade ml_dtypes")
    found: numpy.dtype[Any] = numpy.dtype(kind)
    return found
