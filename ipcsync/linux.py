"""What Linux gives: futexes, membarrier, robust life words, process identity. All through libc, no compiled code.

Every call here releases the GIL while it is in the kernel (ctypes does), and a signal ends a futex wait early, so
Ctrl-C reaches Python at once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from .errors import Unsupported

_SYS_FUTEX, _SYS_MEMBARRIER = 202, 324  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # shared between processes: without FUTEX_PRIVATE_FLAG
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4
_SYS_FUTEX_WAITV, _FUTEX_32 = 449, 2
_NO_WAITV = (errno.ENOSYS, errno.EPERM, errno.EINVAL)  # an old kernel, a sandbox, too many words
_ROBUST, _SHARED = 1, 1
OWNER_DIED = 0x40000000  # set by the kernel in a robust futex's word when its owner's thread is gone
MUTEX_BYTES = 64  # glibc's pthread_mutex_t is 40 bytes on x86-64; a whole cache line is set aside

if sys.platform != "linux" or platform.machine() != "x86_64":  # pragma: no cover - refused, not emulated
    # The ledger's rules are proven for x86-64's store order only (docs/design/ledger.md); elsewhere they may not hold.
    raise Unsupported(f"ipcsync runs on Linux x86-64 only; this is {sys.platform} {platform.machine()}")


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)
_wait = ctypes.CDLL(None, use_errno=True).syscall
_wait.restype = ctypes.c_long
_wait.argtypes = [
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
]  # fmt: skip
_wake = ctypes.CDLL(None, use_errno=True).syscall
_wake.restype = ctypes.c_long
_wake.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
_quick = ctypes.PyDLL(None).syscall
_quick.restype = None
_waitv = ctypes.CDLL(None, use_errno=True).syscall
_waitv.restype = ctypes.c_long
_waitv.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int]
_barrier = ctypes.CDLL(None, use_errno=True).syscall
_barrier.restype = ctypes.c_long
_barrier.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int]


_SPANS = {0.05: ctypes.byref(_Timespec(0, 50_000_000))}  # of waiting.SLICE, which nearly every sleep is given


def keep_standard_descriptors() -> None:
    """Opens /dev/null wherever standard input, output or error is closed: else the next file that is opened takes its
    number, and a child's own standard streams take the file's place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(fd, True)


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleeps while the 32 bits at `address` equal `expected`'s low half, for `seconds` at most; may return early."""
    span = _SPANS.get(seconds) or ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
    _wait(_SYS_FUTEX, address, _FUTEX_WAIT, expected & 0xFFFFFFFF, span, None, 0)


def futex_wake(address: int, count: int = 0x7FFFFFFF) -> None:
    """Wakes whoever sleeps on `address`, in any process that maps it."""
    _wake(_SYS_FUTEX, address, _FUTEX_WAKE, count)


class _Waitv(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


def futex_wait_any(words: Sequence[tuple[int, int]], seconds: float) -> None:
    """Sleeps while every (address, expected) of `words` holds, for `seconds` at most; may return early.

    Beyond 128 words, and before Linux 5.16, it is a nap of a millisecond.
    """
    table = (_Waitv * len(words))(*(_Waitv(value & 0xFFFFFFFF, at, _FUTEX_32, 0) for at, value in words))
    until = time.clock_gettime(time.CLOCK_MONOTONIC) + seconds  # this call takes a moment, not a span
    moment = _Timespec(int(until), int(until % 1 * 1e9))
    count, clock = len(words), time.CLOCK_MONOTONIC
    if _waitv(_SYS_FUTEX_WAITV, table, count, 0, ctypes.byref(moment), clock) < 0 and ctypes.get_errno() in _NO_WAITV:
        time.sleep(min(seconds, 1e-3))


def waker(address: int) -> Callable[[], object]:
    """:func:`futex_wake` of one address at half the cost, for hot paths: its arguments are made once, and the GIL is
    kept, since the call never sleeps."""
    number, where, everybody = ctypes.c_long(_SYS_FUTEX), ctypes.c_void_p(address), ctypes.c_int(0x7FFFFFFF)
    return partial(_quick, number, where, ctypes.c_int(_FUTEX_WAKE), everybody)


def membarrier_register() -> None:
    """Lets other processes' :func:`membarrier` reach this one. Idempotent; once a process."""
    if _barrier(_SYS_MEMBARRIER, _REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise Unsupported(f"membarrier is refused here ({os.strerror(ctypes.get_errno())}); ipcsync needs Linux 4.16+")


def membarrier() -> None:
    """A full fence on every thread that now runs in a registered process: the slow side's half of store-then-load."""
    if _barrier(_SYS_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0) != 0:
        raise Unsupported(f"membarrier failed: {os.strerror(ctypes.get_errno())}")


def robust_lock(address: int) -> None:
    """Makes a robust, process-shared mutex at `address` (64 bytes, ours alone) and locks it for the calling thread.

    When that thread ends in any way, the kernel sets :data:`OWNER_DIED` in the first 32 bits: 0.1 ms after a SIGKILL,
    whatever the process's size, whereas a pidfd waits for its memory to be torn down.
    """
    attributes = (ctypes.c_char * 64)()
    _libc.pthread_mutexattr_init(attributes)
    _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
    _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
    mutex = ctypes.c_void_p(address)
    for status in (_libc.pthread_mutex_init(mutex, attributes), _libc.pthread_mutex_lock(mutex)):
        if status:
            raise Unsupported(f"robust mutex: {os.strerror(status)}")


def robust_unlock(address: int) -> None:
    """Lets the mutex go (by the thread that locked it): a goodbye, no death."""
    _libc.pthread_mutex_unlock(ctypes.c_void_p(address))


@cache
def boot_id() -> str:
    """This boot of the kernel: with pid namespace, pid and start time it names a process for good."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace(pid: int | str = "self") -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def process_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in clock ticks since boot) of a process of this pid namespace; None when gone.

    The state is ``T`` or ``t`` when stopped, ``Z`` for a zombie, which is gone in every way that matters.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold blanks and parentheses
    return fields[0].decode(), int(fields[19])


def start_time(pid: int) -> int:
    """Start time of a live process in clock ticks since boot; 0 when it is gone."""
    found = process_state(pid)
    return 0 if found is None or found[0] in "ZX" else found[1]


def process_uid(pid: int) -> int | None:
    """The effective uid of a process, also of one that gave up root; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    line = next(line for line in status.splitlines() if line.startswith(b"Uid:"))
    return int(line.split()[2])


def is_tmpfs(path: Path) -> bool:
    """Whether `path` lies on tmpfs: elsewhere CUDA refuses to register the page (cudaErrorInvalidValue)."""
    buffer = (ctypes.c_long * 32)()
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return buffer[0] == 0x01021994


def die_with_parent(signal: int) -> None:
    """Asks the kernel to send us `signal` when the thread that started us ends (prctl PR_SET_PDEATHSIG)."""
    if _libc.prctl(1, signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), errno.errorcode.get(ctypes.get_errno(), "prctl"))
