"""The CUDA driver through cuda-bindings: loaded when first needed, its errors as ours, primary contexts on any thread.

The driver API, not the runtime's: it takes streams and events of any device without making one current, its calls let
the GIL go, and ``cuCtxPushCurrent``/``cuCtxPopCurrent`` put the caller's device back exactly, where
``cudaSetDevice`` would leave a context (and half a gigabyte) on a device that nobody asked for.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

from ..errors import (
    CaptureUnsupported,
    CudaError,
    DeviceLost,
    DeviceNotVisible,
    DeviceUnavailable,
    ForkedProcess,
    IpcSyncError,
    OutOfSpace,
    Unsupported,
)

DOCTOR = "`ipcsync doctor` says what is missing"
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_CONTEXT, NOT_READY = 0, 1, 2, 3, 201, 600
MAP_FAILED, INVALID_HANDLE, ALREADY_REGISTERED, NOT_SUPPORTED = 205, 400, 712, 801
# After these the context answers nothing else ever again; 710 to 719 without the host registrations (711 to 713).
_LOST = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 806, 810})
_UNAVAILABLE = {
    34: "the CUDA library here is a stub",
    35: "the NVIDIA driver is older than this CUDA",
    46: "the device is in use in exclusive mode, or otherwise refused",
    100: "no CUDA device was found",
    101: "there is no such CUDA device",
    802: "the system is not ready to start CUDA",
    803: "the NVIDIA driver and its library do not match",
    805: "the MPS server cannot be reached",
    807: "the MPS server is not ready",
    808: "the MPS server has its maximum of clients",
    809: "the MPS server has its maximum of connections",
}


def error_name(status: int) -> str:
    """``CUDA_ERROR_...``, or the bare number where cuda-bindings is missing or older than the driver."""
    try:
        from cuda.bindings import driver

        return str(driver.CUresult(status).name)
    except (ImportError, ValueError):
        return f"CUDA error {status}"


def cuda_error(status: int, call: str, *, forked: bool = False) -> IpcSyncError:
    """What a status other than success means here: a sentence with the cause and the way out."""
    fields: dict[str, Any] = {"status": status, "call": call}
    said = f"{call} answered {error_name(status)}"
    if forked:
        return ForkedProcess(
            f"{said}: this process was forked after its parent used CUDA, which does not survive a fork; "
            'start children with multiprocessing\'s "spawn" method',
            **fields,
        )
    if status in _LOST:
        return DeviceLost(
            f"{said}: this process has lost its CUDA context and cannot mend it (a kernel faulted, or under MPS "
            "another client of the server was killed): leave the process and start it again",
            **fields,
        )
    if 900 <= status <= 908:
        return CaptureUnsupported(f"{said}: {CAPTURE}", **fields)
    if status in _UNAVAILABLE or status == NOT_INITIALIZED:
        return DeviceUnavailable(f"{said}: {_UNAVAILABLE.get(status, 'CUDA did not start')}; {DOCTOR}", **fields)
    if status == OUT_OF_MEMORY and call == "cuDevicePrimaryCtxRetain":
        return OutOfSpace(
            f"{said}: the GPU has no room for another process: its memory is full, or too many hardware queues are "
            "asked for; end some, or start them with a smaller CUDA_DEVICE_MAX_CONNECTIONS",
            **fields,
        )
    if status == OUT_OF_MEMORY:
        return OutOfSpace(f"{said}: the GPU's memory is full; ask for less, or let some go", **fields)
    if status == NOT_SUPPORTED:
        return Unsupported(f"{said}: this GPU or driver cannot do it (MIG has no CUDA IPC); {DOCTOR}", **fields)
    return CudaError(said, **fields)


CAPTURE = (
    "a stream that is being captured into a CUDA graph cannot record or wait across processes, because a replay would "
    "repeat the same round: record and wait outside of the capture"
)
_started: list[int] = []  # the pid that started CUDA


def fail(status: int, call: str) -> NoReturn:
    raise cuda_error(int(status), call, forked=status == NOT_INITIALIZED and _started not in ([], [os.getpid()]))


def check(result: tuple[Any, ...], call: str) -> Any:
    """The value of a driver call's result tuple; raises its error."""
    if result[0]:
        fail(result[0], call)
    return result[1] if len(result) == 2 else result[1:]


@cache
def load() -> Any:
    """cuda-bindings' driver module, CUDA started; ``DeviceUnavailable`` is a sentence about what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceUnavailable(
            "no CUDA device was found: cuda-bindings is not installed, so none was looked for: pip install "
            f'"ipcsync[cuda13]" (or cuda12, as your driver is); {DOCTOR}, and device="cpu" works without'
        ) from None
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # its own class where libcuda.so is not on this machine
        raise DeviceUnavailable(
            f"no CUDA device was found: the NVIDIA driver's library cannot be loaded ({_first_line(error)}); "
            f'{DOCTOR}, and device="cpu" works without'
        ) from None
    if status == 100:
        raise DeviceUnavailable(f'no CUDA device was found; {DOCTOR}, and device="cpu" works without', status=100)
    if status:
        fail(status, "cuInit")
    _started[:] = [os.getpid()]
    return driver


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def find_uuid(uuid: str, visible: list[str]) -> int:
    """The place of a device's UUID among those this process sees; ``DeviceNotVisible`` when it is not there."""
    for index, name in enumerate(visible):
        if name == uuid:
            return index
    raise DeviceNotVisible(
        f"device {uuid} is not among those this process sees ({', '.join(visible) or 'none'}): add it to this "
        "process's CUDA_VISIBLE_DEVICES, or choose another device",
        uuid=uuid,
    )


class Using:
    """Makes a context the thread's current one for a block."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        (status,) = self._driver.cuCtxPushCurrent(self._context)
        if status:
            fail(status, "cuCtxPushCurrent")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._driver.cuCtxPopCurrent()


class Devices:
    """The devices this process sees, by ordinal and by UUID, and their primary contexts, each retained once."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.count = int(check(driver.cuDeviceGetCount(), "cuDeviceGetCount"))
        self._contexts: dict[int, Any] = {}
        self._uuids: list[str] | None = None
        self._lock = threading.Lock()

    def uuids(self) -> list[str]:
        """In the order of the ordinals here."""
        if self._uuids is None:
            self._uuids = [self._uuid(index) for index in range(self.count)]
        return self._uuids

    def _uuid(self, index: int) -> str:
        raw = bytes(check(self._driver.cuDeviceGetUuid(self.handle(index)), "cuDeviceGetUuid").bytes).hex()
        name = bytes(check(self._driver.cuDeviceGetName(80, self.handle(index)), "cuDeviceGetName"))
        kind = "MIG" if b" MIG " in name else "GPU"
        return f"{kind}-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:32]}"

    def handle(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise DeviceUnavailable(
                f"there is no cuda:{index}: this process sees {self.count} of the machine's CUDA devices; {DOCTOR}"
            )
        return check(self._driver.cuDeviceGet(index), "cuDeviceGet")

    def attribute(self, index: int, name: str, default: int = 0) -> int:
        """A device attribute by the end of its name; `default` where this cuda-bindings or driver does not know it."""
        which = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if which is None:
            return default
        status, value = self._driver.cuDeviceGetAttribute(which, self.handle(index))
        return default if status else int(value)

    def context(self, index: int) -> Any:
        found = self._contexts.get(index)
        if found is None:
            with self._lock:
                if index not in self._contexts:
                    retained = self._driver.cuDevicePrimaryCtxRetain(self.handle(index))
                    self._contexts[index] = check(retained, "cuDevicePrimaryCtxRetain")
                found = self._contexts[index]
        return found

    def using(self, index: int) -> Using:
        return Using(self._driver, self.context(index))

    def current(self) -> int:
        """The thread's current device: 0 where it has none yet, as for the CUDA runtime."""
        if not int(check(self._driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):
            return 0
        return int(check(self._driver.cuCtxGetDevice(), "cuCtxGetDevice"))

    def touched(self) -> int:
        """A device whose context is there already: the thread's own, else one we hold, else the current one."""
        if not int(check(self._driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):
            for device in self._contexts:
                return device
        return self.current()
