"""The runtime directory: where a broker and its sessions meet, and the lock that says who the broker is.

It is checked before anything is made in it (LEDGER.md rule 12, docs/design/ledger.md): on tmpfs, ours alone (or of the
owner whom we were told to trust, who lets us in: ``guests.py``), no symbolic link, and short enough that the sockets'
paths fit a ``sockaddr_un``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

from . import config, guests, linux
from .errors import BrokerRunning, BrokerUnavailable, PermissionDenied, RuntimeDirectory

LOCK, SOCKET, ANNOUNCE, LEDGER, JOURNAL = "broker.lock", "broker.sock", "announce.sock", "ledger", "journal"
PULSE = "pulse.sock"  # where those in other pid namespaces show that they are not stopped
EVENTS = "l1"  # folder of host events that need no broker
_KINDS = {
    LOCK: stat.S_IFREG,
    SOCKET: stat.S_IFSOCK,
    ANNOUNCE: stat.S_IFSOCK,
    PULSE: stat.S_IFSOCK,
    LEDGER: stat.S_IFREG,
    JOURNAL: stat.S_IFREG,
    EVENTS: stat.S_IFDIR,
}
SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with its NUL
_FLOCK = "hhqqi4x"  # struct flock on x86-64: type, whence, start, length, pid

_held: dict[tuple[int, int], Lock] = {}  # by (device, inode): closing any descriptor of a locked file drops the lock


def default_directory() -> Path:
    """``$IPCSYNC_RUNTIME_DIR``, else what a configuration file says, else ``/dev/shm/ipcsync-<uid>``; not checked."""
    return Path(config.value("runtime_dir"))


def directory(explicit: Path | str | None = None, *, create: bool) -> Path:
    """The runtime directory, checked, and made (mode 0700) if `create` and it does not exist.

    Raises ``RuntimeDirectory`` or ``PermissionDenied`` for one that cannot be used, and ``BrokerUnavailable`` when it
    does not exist and is not to be made, or not by us.
    """
    path = Path(os.path.abspath(default_directory() if explicit is None else explicit))
    length = len(os.fsencode(path / ANNOUNCE))
    if length > SOCKET_PATH_BYTES:
        raise RuntimeDirectory(
            f"{path} is too long: its sockets' paths would have {length} bytes and {SOCKET_PATH_BYTES} are possible; "
            "set IPCSYNC_RUNTIME_DIR to a shorter path",
            path=str(path),
        )
    found = _lstat(path)
    if found is not None:
        _check_fixed(path, _check(path, found))
        return path
    if not create:
        raise BrokerUnavailable(f"no broker: {path} does not exist; start one with `ipcsync broker`", path=str(path))
    owner = config.value("runtime_owner")
    if owner not in (None, os.getuid()):
        raise BrokerUnavailable(
            f"no broker: {path} does not exist, and it is uid {owner}'s to make (IPCSYNC_RUNTIME_OWNER): have them "
            "start one with `ipcsync broker`",
            path=str(path),
        )
    parent = path.parent
    if not parent.is_dir():
        raise RuntimeDirectory(
            f"{parent} is no directory: make it first, on a tmpfs, or choose another", path=str(path)
        )
    _check_tmpfs(path, parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass  # somebody else started one just now: what is there is checked below
    except OSError as error:
        raise RuntimeDirectory(f"{path} cannot be made: {error.strerror}", path=str(path)) from None
    made = _lstat(path)
    if made is None:
        raise RuntimeDirectory(f"{path} went away as it was made", path=str(path))
    _check_fixed(path, _check(path, made))  # it may not have been we who made it
    return path


def check_contents(path: Path, uids: frozenset[int]) -> None:
    """For whoever is to serve a directory: it is ours, and nothing in it belongs to others than `uids`. Raises
    ``PermissionDenied``."""
    owner = os.lstat(path).st_uid
    if owner != os.getuid():
        raise PermissionDenied(
            f"{path} belongs to uid {owner}, who alone starts its broker: ask for one to be started, or set "
            "IPCSYNC_RUNTIME_DIR to a directory of yours",
            path=str(path),
        )
    for name in sorted(os.listdir(path)):
        _check_entry(path, name, uids)


def let_in(path: Path) -> frozenset[int]:
    """The uids whose a directory is now: its owner, and whom it lets in."""
    found = os.lstat(path)
    return guests.of(path, found) | {found.st_uid}


def _check_fixed(path: Path, uids: frozenset[int]) -> None:
    for name in _KINDS:
        _check_entry(path, name, uids)


def _check_entry(path: Path, name: str, uids: frozenset[int]) -> None:
    """What others put there while they still could, or what is not of its kind, is neither followed nor removed."""
    found = _lstat(path / name)
    if found is None:
        return
    if found.st_uid not in uids:
        raise PermissionDenied(
            f"{path / name} belongs to uid {found.st_uid}, who could once write to {path}: see what it is, and remove "
            "it or set IPCSYNC_RUNTIME_DIR to another directory",
            path=str(path / name),
        )
    kind = _KINDS.get(name)
    if kind is not None and stat.S_IFMT(found.st_mode) != kind:
        raise RuntimeDirectory(
            f"{path / name} is a {_kind(found.st_mode)} where a {_kind(kind)} belongs: remove it, or set "
            "IPCSYNC_RUNTIME_DIR to another directory",
            path=str(path / name),
        )


def _kind(mode: int) -> str:
    names = {stat.S_IFREG: "file", stat.S_IFSOCK: "socket", stat.S_IFLNK: "symbolic link", stat.S_IFDIR: "directory"}
    return names.get(stat.S_IFMT(mode), "device or pipe")


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RuntimeDirectory(f"{path}: {error.strerror}", path=str(path)) from None


def _check(path: Path, found: os.stat_result) -> frozenset[int]:
    """Checks the directory; the uids whose it is: its owner, and whom it lets in."""
    if stat.S_ISLNK(found.st_mode):
        raise RuntimeDirectory(f"{path} is a symbolic link: name the directory itself", path=str(path))
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeDirectory(f"{path} is no directory", path=str(path))
    ours, owner = os.getuid(), found.st_uid
    if owner != ours and owner != config.value("runtime_owner"):
        raise PermissionDenied(
            f"{path} belongs to uid {owner}, we are uid {ours}: set IPCSYNC_RUNTIME_DIR to one of yours (or, if you "
            f"trust uid {owner} with all that this process does, IPCSYNC_RUNTIME_OWNER={owner})",
            path=str(path),
        )
    uids = guests.of(path, found)
    if owner != ours and ours not in uids:
        raise PermissionDenied(
            f"{path} belongs to uid {owner} and does not let uid {ours} in: its owner does with "
            f"`ipcsync broker --allow-uid {ours}`",
            path=str(path),
        )
    _check_tmpfs(path, path)
    return uids | {owner}


def _check_tmpfs(path: Path, where: Path) -> None:
    if not linux.is_tmpfs(where):
        raise RuntimeDirectory(
            f"{path} is not on a tmpfs, and shared pages must be: use one under /dev/shm", path=str(path)
        )


def broker_endpoint(directory: Path) -> str:
    """Where requests go."""
    return f"ipc://{directory / SOCKET}"


def announce_endpoint(directory: Path) -> str:
    """Where announcements come from."""
    return f"ipc://{directory / ANNOUNCE}"


def pulse_endpoint(directory: Path) -> str:
    """Where a connection says that its process is not stopped: libzmq answers heartbeats without Python."""
    return f"ipc://{directory / PULSE}"


def broker_pid(directory: Path) -> int | None:
    """Pid of the broker that serves this directory (0 if it is in another pid namespace); None when there is none."""
    path = directory / LOCK
    try:
        found = os.stat(path, follow_symlinks=False)
        if (found.st_dev, found.st_ino) in _held:
            return os.getpid()
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return lock_holder(fd)
    finally:
        os.close(fd)


def lock_holder(fd: int) -> int | None:
    """Pid of whoever holds a lock on the open file, 0 if it is in another pid namespace; None when nobody does."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


class Lock:
    """The broker's lock: whoever holds it writes the broker's words of the ledger.

    A POSIX lock: the kernel drops it when the process ends, and no forked child keeps it. Take it after becoming a
    daemon. It is held only while the path still names the file that is locked.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        self._fd = -1
        self._key = (0, 0)

    def acquire(self) -> None:
        """Takes the lock; ``BrokerRunning`` names the pid of who has it."""
        mode = guests.file_mode(self.path.parent)
        while True:
            found = _lstat(self.path)
            if found is not None and (found.st_dev, found.st_ino) in _held:
                raise self._running(os.getpid())
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = lock_holder(fd)
                os.close(fd)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if pid is None:
                    continue  # it was let go in between
                raise self._running(pid) from None
            self._fd = fd
            status = os.fstat(fd)
            self._key = (status.st_dev, status.st_ino)
            if self.held():
                _held[self._key] = self
                return
            os.close(fd)  # unlinked by its last owner after we opened it: that file's lock means nothing
            self._fd = -1

    def _running(self, pid: int) -> BrokerRunning:
        return BrokerRunning(
            f"a broker (pid {pid}) already serves {self.path.parent}: use it, stop it with `ipcsync broker --stop`, "
            "or set IPCSYNC_RUNTIME_DIR to another directory",
            pid=pid,
        )

    def held(self) -> bool:
        """Whether we hold the lock of the file that the path names now."""
        if self._fd < 0:
            return False
        found = _lstat(self.path)
        return found is not None and (found.st_dev, found.st_ino) == self._key

    def release(self, *, unlink: bool = False) -> None:
        """Lets it go; `unlink` removes the file first, while it is surely ours."""
        if self._fd < 0:
            return
        if unlink and self.held():
            self.path.unlink()
        _held.pop(self._key, None)
        os.close(self._fd)
        self._fd = -1
