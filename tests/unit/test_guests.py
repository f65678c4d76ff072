"""Access lists as the kernel keeps them, and what a directory without one says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ipcsync import errors, guests


def test_a_list_is_packed_as_the_kernel_has_it() -> None:
    """linux/posix_acl_xattr.h, in the order of tags and ids that the kernel asks for."""
    packed = guests.pack({1001, 7}, 6)
    assert packed.hex(" ", -4) == (
        "02000000 01000600 ffffffff 02000600 07000000 02000600 e9030000 "
        "04000000 ffffffff 10000600 ffffffff 20000000 ffffffff"
    )
    assert guests.unpack(packed)[1:3] == [(2, 6, 7), (2, 6, 1001)]
    for bad in (b"", packed[:-1], b"\1" + packed[1:]):
        with pytest.raises(ValueError, match="version 2"):
            guests.unpack(bad)


@pytest.mark.parametrize(("mode", "made"), [(0o700, 0o600), (0o770, 0o660), (0o777, 0o600), (0o1777, 0o600)])
def test_a_file_is_as_open_as_its_directory_and_never_to_everybody(tmp_path: Path, mode: int, made: int) -> None:
    tmp_path.chmod(mode)
    assert guests.file_mode(tmp_path) == made
    folder = os.open(tmp_path, os.O_PATH)
    assert guests.file_mode(folder) == made
    os.close(folder)
    tmp_path.chmod(0o700)


def test_a_directory_that_names_nobody_is_its_owners(runtime: Path) -> None:
    assert guests.of(runtime, runtime.stat()) == frozenset()
    guests.admit(runtime, frozenset({12345}))
    assert guests.of(runtime, runtime.stat()) == guests.listed(runtime) == {12345}
    guests.admit(runtime, frozenset())
    assert guests.of(runtime, runtime.stat()) == guests.listed(runtime) == frozenset()


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o770])
def test_a_mode_that_lets_others_in_is_refused(runtime: Path, mode: int) -> None:
    runtime.chmod(mode)
    with pytest.raises(errors.PermissionDenied, match=f"{mode:04o}"):
        guests.of(runtime, runtime.stat())
    runtime.chmod(0o700)


def test_where_lists_are_not_kept_it_says_so(runtime: Path) -> None:
    """There is no such uid in the kernel's eyes: the one that stands for none."""
    with pytest.raises(errors.RuntimeDirectory, match="cannot be let in"):
        guests.admit(runtime, frozenset({2**32 - 1}))
