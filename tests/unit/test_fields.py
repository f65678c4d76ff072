"""Fields and data types: names, sizes, the layout of a buffer, and what is refused."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipcsync import dtypes
from ipcsync.errors import InvalidArgument, Unsupported
from ipcsync.fields import ALIGNMENT, Field, fields_of, layout


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("uint8", "uint8"),
        (np.uint8, "uint8"),
        (np.dtype("float16"), "float16"),
        (float, "float64"),
        (bool, "bool"),
        ("?", "bool"),
        ("<i4", "int32"),
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtypes_have_one_name(given: Any, name: str) -> None:
    assert dtypes.dtype_name(given) == name


def test_a_torch_dtype_is_known_by_its_name() -> None:
    class TorchDtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert dtypes.dtype_name(TorchDtype()) == "bfloat16"


@pytest.mark.parametrize("given", ["object", "U8", "datetime64[ns]", ">i4", "no-such", [("a", "i4")], None.__class__])
def test_dtypes_that_mean_nothing_elsewhere_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument):
        dtypes.dtype_name(given)


@pytest.mark.parametrize("name", [n for n in dtypes.NAMES if "bfloat" not in n and "float8" not in n])
def test_sizes_are_numpys(name: str) -> None:
    assert dtypes.itemsize(name) == dtypes.numpy_dtype(name).itemsize == np.dtype(name).itemsize


def test_sizes_of_ml_dtypes_are_theirs() -> None:
    pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        assert dtypes.itemsize(name) == dtypes.numpy_dtype(name).itemsize
        assert dtypes.dtype_name(dtypes.numpy_dtype(name)) == name


def test_missing_ml_dtypes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ml_dtypes":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    dtypes.numpy_dtype.cache_clear()
    assert dtypes.itemsize("bfloat16") == 2
    with pytest.raises(Unsupported, match="pip install ml_dtypes"):
        dtypes.numpy_dtype("bfloat16")


@given(
    st.dictionaries(
        st.from_regex(r"\A[A-Za-z0-9_.\-]{1,20}\Z"),
        st.builds(Field, st.lists(st.integers(1, 50), max_size=4), st.sampled_from(dtypes.NAMES)),
        min_size=1,
        max_size=8,
    )
)
def test_fields_lie_apart_and_aligned(fields: dict[str, Field]) -> None:
    specs, stride = layout(fields)
    assert [(s.name, s.shape, s.dtype) for s in specs] == [(n, f.shape, f.dtype) for n, f in fields.items()]
    end = 0
    for spec in specs:
        assert spec.offset % ALIGNMENT == 0
        assert spec.offset >= end
        end = spec.offset + fields[spec.name].nbytes
    assert end <= stride
    assert stride % ALIGNMENT == 0


def test_a_scalar_is_one_element_and_an_int_one_axis() -> None:
    assert Field((), "float64").nbytes == 8
    assert Field(3, "int16").shape == (3,)
    assert Field((3,), "int16") == Field([3], np.int16)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (-1,), ("a",), (1.5,), (1,) * 17, (1 << 24, 1 << 24)])
def test_bad_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(InvalidArgument):
        Field(shape, "uint8")


@pytest.mark.parametrize("fields", [{}, {"a b": Field(1)}, {"": Field(1)}, {"a": (1, "uint8")}])
def test_bad_fields_are_refused(fields: Any) -> None:
    with pytest.raises(InvalidArgument):
        layout(fields)


def test_either_a_shape_or_fields() -> None:
    assert fields_of(None, (2,), "int8") == ({"array": Field((2,), "int8")}, True)
    assert fields_of({"x": Field(1)}, None, "int8") == ({"x": Field(1)}, False)
    for fields, shape in ((None, None), ({"x": Field(1)}, (1,))):
        with pytest.raises(InvalidArgument):
            fields_of(fields, shape, "int8")
