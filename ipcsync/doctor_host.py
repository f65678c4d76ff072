"""The host's half of ``ipcsync doctor``: versions, shared memory, namespaces, limits, and the ledger's litmus tests."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from . import __version__, linux, runtime
from .doctor_probe import FAILS, OK, WARNING, Finding, probe
from .errors import BrokerUnavailable, IpcSyncError

_PACKAGES = ("pyzmq", "msgpack", "msgspec", "numpy", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "torch")
_INITIAL_PID, _INITIAL_IPC = 0xEFFFFFFC, 0xEFFFFFFF  # inode numbers of the kernel's first namespaces
_GIB = 1 << 30


def findings() -> Iterator[Finding]:
    yield versions()
    yield runtime_directory()
    yield tmpfs("/dev/shm", os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None)
    yield namespace("pid namespace", linux.pid_namespace(), _INITIAL_PID, "--pid=container:NAME")
    yield namespace("ipc namespace", os.stat("/proc/self/ns/ipc").st_ino, _INITIAL_IPC, "--ipc=container:NAME")
    yield limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield probe("whole words", "litmus.whole_words")
    yield probe("store and load", "litmus.store_load")
    yield probe("futex", "litmus.futex")
    yield probe("robust mutex", "litmus.robust_word")


def versions() -> Finding:
    found = [f"ipcsync {__version__}", f"Python {platform.python_version()}", f"Linux {platform.release()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return Finding("versions", OK, ", ".join(found))


def runtime_directory() -> Finding:
    name, where = "runtime directory", runtime.default_directory()
    try:
        path = runtime.directory(create=False)
    except BrokerUnavailable:
        return _parent(name, where)
    except IpcSyncError as error:
        return Finding(name, FAILS, str(error), "fix it, or point IPCSYNC_RUNTIME_DIR elsewhere on a tmpfs")
    pid = runtime.broker_pid(path)
    return Finding(name, OK, f"{path}, " + (f"served by a broker (pid {pid})" if pid is not None else "no broker runs"))


def _parent(name: str, where: Path) -> Finding:
    if not where.parent.is_dir() or not linux.is_tmpfs(where.parent):
        return Finding(
            name, FAILS, f"{where.parent} is no tmpfs, and shared pages must be on one",
            "set IPCSYNC_RUNTIME_DIR to a directory under /dev/shm",
        )  # fmt: skip
    if not os.access(where.parent, os.W_OK):
        return Finding(name, FAILS, f"{where.parent} is not writable", "set IPCSYNC_RUNTIME_DIR to one of yours")
    return Finding(name, OK, f"{where} will be made by the first broker")


def tmpfs(path: str, found: os.statvfs_result | None) -> Finding:
    """Space for ledgers and host channels."""
    name = f"space on {path}"
    if found is None:
        return Finding(name, FAILS, f"{path} does not exist", "mount a tmpfs there")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    grow = "in a container: docker run --shm-size=8g, or an emptyDir with medium: Memory; else remount it larger"
    if free < 16 << 20:
        return Finding(name, FAILS, text, grow)
    if free < _GIB:
        return Finding(name, WARNING, text + ": enough for events, little for host channels", grow)
    return Finding(name, OK, text)


def namespace(name: str, inode: int, initial: int, option: str) -> Finding:
    if inode == initial:
        return Finding(name, OK, "the host's own")
    return Finding(
        name, WARNING, f"one of a container ({inode})",
        f"the broker and its sessions must all share it, and /dev/shm: one container, or {option} and one tmpfs",
    )  # fmt: skip


def limits(files: int) -> Finding:
    if files < 1024:
        return Finding("open files", WARNING, f"at most {files}", "ulimit -n 4096: a broker holds two a session")
    return Finding("open files", OK, f"at most {files}")
