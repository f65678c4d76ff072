"""What device= and stream= may be, on a made-up machine with two accelerators (host streams that say cuda)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import ipcsync
from ipcsync import Device, Event, Stream, errors
from ipcsync.backends import select
from ipcsync.backends.host import HostBackend
from ipcsync.device import as_device
from ipcsync.stream import locate, resolve, resolve_any


class TwoDevices(HostBackend):
    device_type = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.theirs: dict[str, Any] = {}
        self.entered: list[int] = []

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def uuid(self, device: int) -> str:
        return f"GPU-{device}"

    def current_stream(self, device: int) -> Any:
        if len(set(self.theirs.values())) > 1:
            raise errors.AmbiguousStream("they differ")
        return f"current of {device}"

    def framework_streams(self, device: int) -> dict[str, Any]:
        return self.theirs

    def foreign_stream(self, stream: object) -> tuple[Any, int] | None:
        if isinstance(stream, int) and not isinstance(stream, bool):
            return f"pointer {stream}", stream % 2
        return None

    @contextmanager
    def using_stream(self, raw: Any, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        self.entered.append(device)
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    made = TwoDevices()
    monkeypatch.setitem(select._made, "cuda", made)
    monkeypatch.setattr(select, "has_cuda", lambda: True)
    return made


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without an accelerator."""

    def load() -> None:
        raise errors.DeviceUnavailable("no driver: `ipcsync doctor` says what is missing")

    select.has_cuda.cache_clear()
    monkeypatch.delitem(select._made, "cuda", raising=False)
    monkeypatch.setattr("ipcsync.backends.cuda.load", load)
    yield
    select.has_cuda.cache_clear()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("cpu", Device("cpu")),
        ("cpu:0", Device("cpu")),
        ("cuda", Device("cuda", 1)),
        ("cuda:0", Device("cuda", 0)),
        (1, Device("cuda", 1)),
        (Device("cuda", 1), Device("cuda", 1)),
        (None, Device("cuda", 1)),
        (SimpleNamespace(type="cuda", index=0), Device("cuda", 0)),  # torch.device("cuda:0")
        (SimpleNamespace(type="cuda", index=None), Device("cuda", 1)),  # torch.device("cuda")
        (SimpleNamespace(type="cpu", index=None), Device("cpu")),
        (SimpleNamespace(id=1), Device("cuda", 1)),  # cupy.cuda.Device(1)
    ],
)
def test_devices_by_any_name(cuda: TwoDevices, given: object, meant: Device) -> None:
    cuda.current = 1
    assert as_device(given) == meant


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "gpu",
        "cuda:",
        "cuda:-1",
        "cuda: 1",
        "cuda:1x",
        "CUDA",
        b"cuda",
        1.0,
        True,
        SimpleNamespace(type="mps", index=0),
        object(),
    ],
)
def test_what_is_no_device(cuda: TwoDevices, wrong: object) -> None:
    for call in (as_device, Event, Stream, ipcsync.current_stream):
        with pytest.raises(errors.InvalidArgument, match="is no device"):
            call(wrong)


@pytest.mark.parametrize("missing", ["cuda:2", 2, -1, Device("cuda", 7), SimpleNamespace(id=99)])
def test_devices_that_are_not_there(cuda: TwoDevices, missing: object) -> None:
    for call in (as_device, Event, Stream):
        with pytest.raises(errors.DeviceUnavailable, match="ipcsync doctor"):
            call(missing)


@pytest.mark.usefixtures("bare")
def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert as_device(None) == Event().device == Stream().device == ipcsync.current_stream().device == Device("cpu")
    for call in (as_device, Event, Stream):
        with pytest.raises(errors.DeviceUnavailable, match="ipcsync doctor"):
            call("cuda")


def test_names(cuda: TwoDevices) -> None:
    assert (str(Device("cpu")), str(Device("cuda", 1))) == ("cpu", "cuda:1")
    assert (Device("cpu").uuid, Device("cuda", 1).uuid) == ("cpu", "GPU-1")
    with pytest.raises(errors.InvalidArgument, match="backend"):
        select.backend("mps")


# -- an event without an ordinal


def test_an_event_is_where_it_is_first_recorded(cuda: TwoDevices) -> None:
    event = Event("cuda")
    assert event.device == Device("cuda", 0)
    event.record(Stream("cuda:1"))
    assert event.device == Device("cuda", 1)
    with pytest.raises(errors.WrongDevice, match=r"cuda:0.*cuda:1"):
        event.record(Stream("cuda:0"))


def test_an_event_is_made_on_the_current_device_when_exported(cuda: TwoDevices, runtime: object) -> None:
    event = Event("cuda", interprocess=True)
    cuda.current = 1
    handle = event.ipc_handle()
    cuda.current = 0
    assert event.device == Device("cuda", 1)
    assert Event.from_ipc_handle("cuda", handle) is event
    assert Event.from_ipc_handle("cuda:1", handle) is event
    for wrong in ("cuda:0", "cpu"):
        with pytest.raises(errors.WrongDevice):
            Event.from_ipc_handle(wrong, handle)


def test_an_event_with_an_ordinal_takes_no_other_device(cuda: TwoDevices) -> None:
    event = Event("cuda:0")
    with pytest.raises(errors.WrongDevice):
        event.record(Stream("cuda:1"))
    with pytest.raises(errors.WrongDevice):
        event.record(Stream("cpu"))
    assert event.query()


def test_streams_of_any_device_of_the_kind_wait(cuda: TwoDevices) -> None:
    event, other = Event("cuda:0"), Stream("cuda:1")
    event.record(Stream("cuda:0"))
    other.wait_event(event)
    event.wait(other)
    with other:
        event.wait()
    other.wait_stream(Stream("cuda:0"))
    other.synchronize()
    with pytest.raises(errors.WrongDevice):
        event.wait(Stream("cpu"))
    with pytest.raises(errors.WrongDevice):
        Event("cpu").wait(other)


# -- which stream


def test_the_innermost_stream_of_that_device_is_current(cuda: TwoDevices) -> None:
    zero, one, cpu = Stream("cuda:0"), Stream("cuda:1"), Stream("cpu")
    with zero, one, cpu:
        assert ipcsync.current_stream("cuda:0") is zero
        assert resolve(None, Device("cuda", 0)) is zero._raw
        assert resolve(None, Device("cuda", 1)) is one._raw
        assert locate(None, "cuda") == (one._raw, one.device)
        assert locate(None, "cpu") == (cpu._raw, cpu.device)
        assert cuda.current == 1
    assert cuda.entered == [0, 1]
    assert resolve(None, Device("cuda", 1)) == "current of 1"
    cuda.current = 1
    assert locate(None, "cuda") == ("current of 1", Device("cuda", 1))


def test_what_waits_or_reads_may_be_on_any_device_of_the_kind(cuda: TwoDevices) -> None:
    here, one = Device("cuda", 0), Stream("cuda:1")
    zero = Stream("cuda:0")
    assert resolve_any(zero, here) is zero._raw
    assert resolve_any(one, here) is one._raw
    assert resolve_any(5, here) == "pointer 5"
    assert resolve_any(None, here) == "current of 0"
    cuda.current = 1
    assert resolve_any(None, here) == "current of 1", "as torch has it: the current device's"
    cuda.theirs = {"torch": "t", "cupy": "c"}
    assert resolve_any(None, here, streams="torch") == "t"
    with one:
        assert resolve_any(None, here) is one._raw
    assert resolve_any(None, Device("cpu")) is None
    for wrong in (Stream("cpu"), "stream"):
        with pytest.raises((errors.WrongDevice, errors.InvalidArgument)):
            resolve_any(wrong, here)


def test_frameworks_that_differ_are_ambiguous_unless_one_was_named(cuda: TwoDevices) -> None:
    cuda.theirs = {"torch": "t", "cupy": "c"}
    where = Device("cuda", 0)
    with pytest.raises(errors.AmbiguousStream):
        resolve(None, where)
    assert resolve(None, where, streams="torch") == "t"
    assert resolve(None, where, streams="cupy") == "c"
    stream = Stream("cuda:0")
    assert resolve(stream, where, streams="torch") is stream._raw
    with stream:
        assert resolve(None, where, streams="torch") is stream._raw, "ours comes first"
    cuda.theirs = {"cupy": "c"}
    assert resolve(None, where, streams="torch") == "current of 0", "torch has not started: it has no current stream"
    assert resolve(None, Device("cpu"), streams="torch") is None


def test_foreign_streams_are_of_their_device(cuda: TwoDevices) -> None:
    assert resolve(4, Device("cuda", 0)) == "pointer 4"
    with pytest.raises(errors.WrongDevice, match=r"cuda:1.*cuda:0"):
        resolve(5, Device("cuda", 0))
    for foreign in (SimpleNamespace(ptr=1), SimpleNamespace(cuda_stream=1), SimpleNamespace(__cuda_stream__=1)):
        with pytest.raises(errors.WrongDevice, match="CUDA"):
            resolve(foreign, Device("cpu"))
    with pytest.raises(errors.InvalidArgument):
        resolve(1234, Device("cpu"))


def test_other_libraries_take_ours_by_the_stream_protocol(cuda: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "new_stream", lambda device, priority: 4096)
    assert Stream("cuda").__cuda_stream__() == (0, 4096)
    assert not hasattr(Stream("cpu"), "__cuda_stream__")
    assert not hasattr(Stream("cpu"), "ptr")


def test_what_they_look_like(cuda: TwoDevices) -> None:
    assert repr(Stream("cpu")) == "<ipcsync.Stream on cpu>"
    assert repr(ipcsync.current_stream("cpu")) == "<ipcsync.Stream on cpu (the calling thread)>"
    assert repr(ipcsync.current_stream("cuda")) == "<ipcsync.Stream on cuda:0 (not ours)>"
    assert repr(Event("cuda")) == "<ipcsync.Event on cuda>"
    assert repr(Event("cuda:1")) == "<ipcsync.Event on cuda:1>"
