"""What the rules of channels are tried with: items full of their number, who writes and who reads them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy

import ipcsync

from ..harness import Child, Peer

Spawn = Callable[..., Child]
SHAPE = (4, 8)


def host(array: Any) -> numpy.ndarray:
    """The values, copied to the host once the current stream got there."""
    return array.get() if hasattr(array, "get") else numpy.array(array)


def same(array: Any, value: Any) -> bool:
    return bool((host(array) == value).all())


# -- children


def write_items(peer: Peer, count: int) -> None:
    with ipcsync.connect(name="writer") as session, session.open_channel("frames").writer() as writer:
        for _ in range(count):
            with writer.slot() as slot:
                slot.array[...] = slot.number
                slot.meta["number"] = slot.number


def read_all(peer: Peer, **options: Any) -> list[int]:
    numbers = []
    with ipcsync.connect(name="reader") as session, session.open_channel("frames").reader(**options) as reader:
        peer.send("attached")
        for slot in reader.slots():
            assert same(slot.array, slot.number), f"item {slot.number} holds {host(slot.array)}"
            assert slot.meta == {"number": slot.number}
            numbers.append(slot.number)
    return numbers


def fail_after(peer: Peer, count: int) -> None:
    with ipcsync.connect(name="unlucky") as session:
        try:
            with session.open_channel("frames").writer() as writer:
                for _ in range(count):
                    with writer.slot() as slot:
                        slot.array[...] = slot.number
                raise ValueError("no more")
        except ValueError:
            pass


def hang_in_slot(peer: Peer, count: int) -> None:
    """Publishes `count` items and stays in the next one's block."""
    session = ipcsync.connect(name="victim")
    writer = session.open_channel("frames").writer()
    for _ in range(count):
        with writer.slot() as slot:
            slot.array[...] = slot.number
    with writer.slot() as slot:
        slot.array[...] = -1
        peer.send("in the slot")
        signal.pause()
