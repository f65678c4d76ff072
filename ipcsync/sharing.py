"""How a shared array comes to be: memory the caller owns, memory the broker makes, or a name that exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from .backends import select
from .backends.base import Backend
from .device import Device, as_device
from .dtypes import dtype_name, itemsize
from .errors import InvalidArgument, NotExportable, WrongDevice
from .fields import SINGLE, Field, fields_of, layout
from .opening import attached
from .shared_array import SharedArray
from .waiting import UNSET, Timeout
from .wire import ArrayInfo, ArraySpec, CreateArray, FieldSpec, MemoryInfo, Open

if TYPE_CHECKING:
    from .session import Session


def share(
    session: Session,
    name: str,
    arrays: Any,
    *,
    max_readers: int = 16,
    exist_ok: bool = False,
    timeout: Timeout = UNSET,
) -> SharedArray:
    """Shares memory that the caller owns, one array or a dict of them, under one name: they stay where they are.

    On CUDA: CuPy arrays or torch tensors, whole allocations or parts of them, all of one device. On the CPU: arrays
    over a mapped file of a tmpfs. Of any positive strides. What they hold now is version 0. `max_readers`: processes
    that read at a time. Keep the memory as long as others may read it.

    Raises ``NotExportable`` with the reason (private host memory, ``cudaMallocAsync``, torch's expandable segments,
    managed memory), ``WrongDevice`` for arrays of several devices, ``NameInUse``.
    """
    session.check()
    given = dict(arrays) if isinstance(arrays, Mapping) else {SINGLE: arrays}
    if not given:
        raise InvalidArgument("share() got an empty dict: give at least one array")
    device = _device_of(next(iter(given.values())))
    backend = select.backend(device)
    layout({key: Field(1, "uint8") for key in given})  # refuses bad names
    specs, memory = [], dict[bytes, MemoryInfo]()
    for key, array in given.items():
        if _device_of(array) != device:
            where = _device_of(array)
            raise WrongDevice(f"{key!r} is on {where}, the arrays before it on {device}: share each device's apart")
        specs.append(_describe(backend, device, key, array, memory))
    spec = ArraySpec(tuple(specs), memory="session", max_readers=max_readers, single=not isinstance(arrays, Mapping))
    backend.stream_synchronize(session.stream(None, device))  # version 0 is what they hold now
    uuid = backend.uuid(device.index)
    request = CreateArray(name, uuid, spec, exist_ok, tuple(memory.values()))
    made = session.request("create_array", request, ArrayInfo, session.deadline(timeout))
    return SharedArray(session, made, own=given)


def _describe(backend: Backend, device: Device, key: str, array: Any, memory: dict[bytes, MemoryInfo]) -> FieldSpec:
    """The array as a field of the memory it lies in, which is added to `memory` if it is new."""
    name = dtype_name(array.dtype)
    shape = tuple(int(n) for n in array.shape)
    if 0 in shape:
        raise NotExportable(f"{key!r} of shape {shape} has no elements: there is nothing to share")
    if callable(getattr(array, "stride", None)):  # torch counts in elements
        strides = tuple(int(n) * itemsize(name) for n in array.stride())
    else:
        strides = tuple(int(n) for n in array.strides)
    if any(n < 0 for n in strides):
        raise NotExportable(f"{key!r} runs backwards in memory (strides {strides}): share the array it is a view of")
    if device.type == "cpu":
        import numpy

        array = numpy.asarray(array)  # a view of torch's
    whole, offset = backend.export(array)
    if whole.handle not in memory:
        memory[whole.handle] = MemoryInfo(whole.handle, whole.nbytes, backend.uuid(device.index))
    return FieldSpec(key, shape, name, offset, strides, list(memory).index(whole.handle))


def _device_of(array: Any) -> Device:
    """Where an array lies: it says so itself (CuPy, torch), or it is the host's."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise InvalidArgument(f"{type(array).__name__} is no array: share numpy, CuPy or torch arrays")
    device = getattr(array, "device", "cpu")
    return as_device("cpu" if device == "cpu" else device)


def create_array(
    session: Session,
    name: str,
    fields: Mapping[str, Field] | None = None,
    *,
    shape: Any = None,
    dtype: Any = "float32",
    device: Any = None,
    max_readers: int = 16,
    lifetime: Literal["session", "broker"] = "session",
    exist_ok: bool = False,
    timeout: Timeout = UNSET,
) -> SharedArray:
    """Creates the shared array `name`: zeroed memory of the broker's, which no worker's death takes away.

    `fields`: a map of names to :class:`Field`; or `shape` (elements) and `dtype` of the only one. `device`: where it
    is; None is the accelerator if there is one, else the CPU. `max_readers`: processes that read at a time. `lifetime`:
    until this session has ended and nobody is attached, or (``"broker"``) until ``session.unlink(name)``.

    Raises ``NameInUse`` (unless `exist_ok` and the specification is equal), ``QuotaExceeded``, ``OutOfSpace``.
    """
    session.check()
    named, single = fields_of(fields, shape, dtype)
    specs, _ = layout(named)
    if lifetime not in ("session", "broker"):
        raise InvalidArgument(f"lifetime is 'session' or 'broker', not {lifetime!r}")
    if not 1 <= max_readers <= 256:
        raise InvalidArgument(f"max_readers is {max_readers!r}: from 1 to 256")
    spec = ArraySpec(specs, lifetime=lifetime, max_readers=max_readers, single=single)
    where = as_device(device)
    request = CreateArray(name, select.backend(where).uuid(where.index), spec, exist_ok)
    return SharedArray(session, session.request("create_array", request, ArrayInfo, session.deadline(timeout)))


def open_array(session: Session, name: str, timeout: Timeout = UNSET) -> SharedArray:
    """The body of ``Session.open_array``."""
    session.check()
    info = session.request("open_array", Open("array", name), ArrayInfo, session.deadline(timeout))
    with attached(session, info.event.incarnation):
        return SharedArray(session, info)
