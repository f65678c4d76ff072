"""Other uids that a runtime directory lets in, by a POSIX access list on it, which all that is made in it inherits.

So one place says who may come, the kernel enforces it, and it needs neither a group nor an administrator: a uid may put
a list on what is its own. A file of the directory is open to the guests where it has mode 0660 (the bits of the group
are then the most that the list gives), and the owning group itself gets nothing. The list is read and written as the
kernel keeps it, ``linux/posix_acl_xattr.h``: a version, then (tag, permissions, id) in the order of their tags.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .errors import PermissionDenied, RuntimeDirectory

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_OWNER, _USER, _OWNING_GROUP, _GROUP, _MASK, _OTHERS = 1, 2, 4, 8, 0x10, 0x20
_VERSION, _NOBODY = struct.pack("<I", 2), 0xFFFFFFFF  # the id where a tag needs none
_ENTRY = "<HHI"


def pack(uids: Iterable[int], permissions: int) -> bytes:
    """A list that gives `permissions` (4 read, 2 write, 1 enter) to the owner and to these, and nothing to others."""
    entries = [
        (_OWNER, permissions, _NOBODY),
        *((_USER, permissions, uid) for uid in sorted(uids)),
        (_OWNING_GROUP, 0, _NOBODY),
        (_MASK, permissions, _NOBODY),
        (_OTHERS, 0, _NOBODY),
    ]
    return _VERSION + b"".join(struct.pack(_ENTRY, *entry) for entry in entries)


def unpack(packed: bytes) -> list[tuple[int, ...]]:
    """(tag, permissions, id) of each entry."""
    if packed[:4] != _VERSION or len(packed) % 8 != 4:
        raise ValueError("no access list of version 2")
    return list(struct.iter_unpack(_ENTRY, packed[4:]))


def of(path: Path, found: os.stat_result) -> frozenset[int]:
    """The uids beside its owner that may enter the directory, whose status is `found`.

    Raises ``PermissionDenied`` if it is open to more than such: to a group, or to everybody.
    """
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o077:
        return frozenset()
    entries = _list(path) or [(_OWNING_GROUP, mode >> 3 & 7, _NOBODY)]  # without a list the mode says it all
    if mode & 0o007 or any(tag in (_OWNING_GROUP, _GROUP) and permissions for tag, permissions, _ in entries):
        raise PermissionDenied(f"{path} has mode {mode:04o}, others may enter: `chmod 700 {path}`", path=str(path))
    return _users(entries)


def listed(path: Path) -> frozenset[int]:
    """The uids that the list of a directory names, whoever else may enter."""
    return _users(_list(path))


def _list(path: Path) -> list[tuple[int, ...]]:
    try:
        return unpack(os.getxattr(path, _ACCESS, follow_symlinks=False))
    except (OSError, ValueError):
        return []


def _users(entries: list[tuple[int, ...]]) -> frozenset[int]:
    return frozenset(id for tag, permissions, id in entries if tag == _USER and permissions)


def admit(directory: Path, uids: frozenset[int]) -> None:
    """Lets in these uids, and no others, to the directory and to what is ours in it already. For its owner."""
    try:
        _admit(directory, uids, 7)
        for path in directory.iterdir():
            with suppress(FileNotFoundError):  # its session lives, and was done with it
                found = path.lstat()
                if found.st_uid != os.getuid():
                    continue  # a guest's: it has the list that it was made with
                if stat.S_ISDIR(found.st_mode):
                    admit(path, uids)
                elif stat.S_ISREG(found.st_mode):
                    _admit(path, uids, 6)
    except OSError as error:
        raise RuntimeDirectory(
            f"{directory}: uids {', '.join(map(str, sorted(uids)))} cannot be let in ({error.strerror}): it takes a "
            "tmpfs that keeps access lists (CONFIG_TMPFS_POSIX_ACL), and uids that exist in our user namespace",
            path=str(directory),
        ) from None


def _admit(path: Path, uids: frozenset[int], permissions: int) -> None:
    folder = permissions & 1
    if uids:
        if folder:  # first: what is made from now on, which is ours too where a guest makes it
            os.setxattr(path, _DEFAULT, pack(uids | {os.getuid()}, permissions), follow_symlinks=False)
        os.setxattr(path, _ACCESS, pack(uids, permissions), follow_symlinks=False)
        return
    lists = {_ACCESS, _DEFAULT}.intersection(os.listxattr(path, follow_symlinks=False))
    for name in lists:
        os.removexattr(path, name, follow_symlinks=False)
    if lists:
        os.chmod(path, permissions << 6)  # what is left of a list are the bits of its mask


def file_mode(folder: int | Path) -> int:
    """The mode of a new file in the directory (a path or a descriptor): for its owner, and for the guests if any."""
    return 0o660 if os.stat(folder).st_mode & 0o077 == 0o070 else 0o600
