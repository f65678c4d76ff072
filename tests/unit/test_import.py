"""`import ipcsync` is cheap: what is heavy comes when it is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ipcsync

HEAVY = ("numpy", "zmq", "cupy", "cuda", "torch", "msgpack", "msgspec", "click", "rich", "asyncio")


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, ipcsync; print(*[m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == []


@pytest.mark.parametrize("name", sorted(set(ipcsync.__all__) - {"__version__"}))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ipcsync, name).__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Evnet'"):
        ipcsync.Evnet  # noqa: B018


def test_names_are_listed_before_they_are_loaded() -> None:
    code = "import ipcsync; assert {'connect', 'Event', 'PeerDied'} <= set(dir(ipcsync))"
    subprocess.run([sys.executable, "-c", code], check=True)
