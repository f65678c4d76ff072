"""Files of shared memory: born complete, mapped, read as 64-bit words.

A file appears under its name only when it is complete (LEDGER.md rule 12): it is made without a name (O_TMPFILE), its
space is reserved with ``posix_fallocate`` (a full tmpfs is an error here, not a SIGBUS later), filled, and then linked.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from . import guests
from .errors import OutOfSpace


def reserve(fd: int, nbytes: int, path: Path) -> None:
    """Reserves `nbytes` for the file, or raises ``OutOfSpace`` with nothing kept."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(fd, 0)
            raise OutOfSpace(
                f"{nbytes} bytes do not fit on the tmpfs of {path}: use a larger tmpfs, or ask for less",
                needed=nbytes,
                path=str(path),
            ) from None
        raise


_FIXED = 0x10  # MAP_FIXED, of linux/mman.h
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _no_bell(_: int) -> None:
    return None


class Region:
    """One shared file mapped into this process.

    ``words`` is its memory as unsigned 64-bit words (whole loads and stores on x86-64), ``address`` where it begins.
    """

    def __init__(self, path: Path, fd: int, *, writable: bool = True) -> None:
        self.path = path
        status = os.fstat(fd)
        self.nbytes, self.inode = status.st_size, status.st_ino
        self.writable = writable
        #: Of a word, the word that its waiters sleep on (see bells.py); None: they sleep on the word itself.
        self.bell_of: Callable[[int], int | None] = _no_bell
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED, prot=access)
        self.bytes = memoryview(self._map)
        self.words = self.bytes[: self.nbytes // 8 * 8].cast("Q")
        if writable:
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        else:
            import numpy

            self.address = numpy.frombuffer(self._map, numpy.uint8).ctypes.data

    @classmethod
    def open(cls, path: Path, *, writable: bool = True) -> Region:
        """Maps an existing file of ours; never follows a symbolic link."""
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(path, fd, writable=writable)
        finally:
            os.close(fd)

    @classmethod
    def create(cls, path: Path, nbytes: int, fill: Callable[[Region], None] = lambda _: None) -> Region:
        """Makes the file: reserved, filled by `fill`, mapped, and only then linked under its name (FileExistsError)."""
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        fd = -1
        try:
            fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, guests.file_mode(folder))
            reserve(fd, nbytes, path)
            region = cls(path, fd)
            fill(region)
            # Naming the folder by a descriptor makes CPython call linkat, which alone follows the link in /proc.
            os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            if fd >= 0:
                os.close(fd)
            os.close(folder)
        return region

    def replaced(self) -> bool:
        """Whether another file stands under our name by now."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_ino != self.inode
        except FileNotFoundError:
            return False

    def part(self) -> None:
        """In a forked child: what it stores here from now on stays its own, and is not said in its parent's name."""
        with suppress(OSError, ValueError):  # the file is gone, and with it whom it was for; or this is closed
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if self.words and os.fstat(fd).st_ino == self.inode:
                    _map(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED, fd, 0)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Unmaps. Arrays over it that still live keep the mapping until they are collected."""
        self.words.release()
        self.bytes.release()
        try:
            self._map.close()
        except BufferError:
            pass  # an array still looks at it: the mapping goes with the last of them
