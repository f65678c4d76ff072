"""A stream of another kind of device is refused by name, before anything is recorded or waited for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ipcsync import Device, Event, Stream, errors


class Foreign:
    """What CuPy and others hand around."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


@pytest.mark.parametrize(
    "stream",
    [SimpleNamespace(cuda_stream=0), Foreign(), SimpleNamespace(ptr=0, device_id=0)],
    ids=["torch", "protocol", "cupy"],
)
def test_an_event_is_recorded_on_streams_of_its_device_only(runtime: Path, stream: object) -> None:
    event = Event("cpu")
    for call in (event.record, event.wait):
        with pytest.raises(errors.WrongDevice, match="CUDA stream"):
            call(stream)
    assert event.query(), "nothing was recorded"


def test_ours_of_another_device_are_refused_as_well(runtime: Path) -> None:
    other = Stream._of(Device("cpu"), None)
    other.device = Device("cuda", 1)
    with pytest.raises(errors.WrongDevice, match="cuda:1"):
        Event("cpu").record(other)
