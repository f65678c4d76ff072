"""A session's own locked file: how a broker in another pid namespace knows that the process is gone.

There a pid means nothing and no pidfd can be had. But a POSIX lock is the kernel's: it goes when the process goes, on
whichever side of a namespace it is looked at, no forked child keeps it, and asking who holds it answers with a pid of
the asker's own namespace, where there is one.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path

from . import guests, linux, runtime
from .errors import RuntimeDirectory

PATTERN = r"life-[0-9a-f]{32}"


class LifeFile:
    """A file that this process holds locked until it ends, or :meth:`remove`. It is locked before it has a name."""

    def __init__(self, directory: Path) -> None:
        self.name = f"life-{secrets.token_hex(16)}"
        self._path = directory / self.name
        self._fd = folder = -1
        try:
            folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, guests.file_mode(folder))
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(f"/proc/self/fd/{self._fd}", self.name, dst_dir_fd=folder, follow_symlinks=True)
        except OSError as error:
            raise RuntimeDirectory(
                f"no file can be made in {directory}: {error.strerror}", path=str(directory)
            ) from None
        finally:
            if folder >= 0:
                os.close(folder)

    def remove(self) -> None:
        """Nothing of this process can touch the session's memory any more. Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def holder(path: Path) -> int | None:
    """Pid of whoever holds the file locked, 0 if ours does not see its pid namespace, or if there is no such file; None
    when it is free: its process is gone. Not for a file that this process itself holds."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0  # unknown
    try:
        return runtime.lock_holder(fd)
    finally:
        os.close(fd)


def seen(directory: Path) -> bool:
    """Whether the broker of this directory runs in our own pid namespace, and so sees our end by itself."""
    pid = runtime.broker_pid(directory)
    try:
        return bool(pid) and linux.pid_namespace(pid or 0) == linux.pid_namespace()
    except OSError:
        return False


def sweep(directory: Path) -> None:
    """Removes those files that nobody holds locked: a file has its name only once it is locked."""
    for path in directory.glob("life-*"):
        if re.fullmatch(PATTERN, path.name) and holder(path) is None:
            path.unlink(missing_ok=True)
