"""One process may have sessions with several brokers: everything is looked for in the session's own directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ipcsync

from ..harness import Broker
from ..places import Runtime


@pytest.fixture
def two(runtime: Path) -> Iterator[list[Path]]:
    """Two directories with a broker each; neither is the one of the environment."""
    places = [Runtime(), Runtime()]
    try:
        brokers = [Broker(place.path) for place in places]
        yield [place.path for place in places]
        for place, broker in zip(places, brokers, strict=True):
            assert broker.stop() == 0
            assert place.leaks() == []
    finally:
        for place in places:
            place.remove()


@pytest.mark.parametrize("memory", ["broker", "session"])
def test_the_same_names_in_two_directories_are_different_things(two: list[Path], memory: str) -> None:
    with ipcsync.connect(two[0]) as first, ipcsync.connect(two[1]) as second:
        sessions = [first, second]
        for value, session in enumerate(sessions):
            session.create_channel("frames", shape=(8,), dtype="int32", device="cpu", memory=memory)
            session.create_array("weights", {"w": ipcsync.Field((8,), "int32")}, device="cpu")
            session.create_event("frame", device="cpu").record()
            with session.open_array("weights").write() as view:
                view["w"][...] = value
        for value, session in enumerate(sessions):
            channel = session.open_channel("frames")
            with channel.reader() as reader, channel.writer() as writer:
                with writer.slot() as slot:
                    slot.array[...] = value
                with reader.get() as item:
                    assert (item.array == value).all()
                writer.detach()
            with session.open_array("weights").read() as view:
                assert (view["w"] == value).all()
