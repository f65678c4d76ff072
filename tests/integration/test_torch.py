"""ipcsync.torch: tensors over slots, torch's streams, a module's parameters as versions, a queue of tensors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync import Field, errors

from ..harness import Child, Peer

torch = pytest.importorskip("torch", reason="torch is an optional test dependency: pip install torch")

import ipcsync.torch as ours  # noqa: E402  (it needs torch)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_is_loaded_only_when_it_is_used() -> None:
    code = "import sys, ipcsync; assert 'torch' not in sys.modules; ipcsync.torch.Queue; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_torch_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import ipcsync; ipcsync.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install torch" in done.stderr


# -- slots as tensors


@pytest.mark.parametrize("name", ["bool", "uint8", "int16", "int64", "uint32", "float16", "float32", "complex64"])
def test_a_slots_fields_are_tensors_over_the_same_memory(session: ipcsync.Session, device: str, name: str) -> None:
    fields = {"a": Field((3, 4), name), "b": Field((), name)}
    channel = session.create_channel("frames", fields=fields, depth=2, device=device)
    with channel.reader() as reader, channel.writer() as writer:
        with writer.slot() as slot, ours.using(slot):
            found = ours.tensors(slot)
            assert found["a"].shape == (3, 4)
            assert found["b"].shape == ()
            assert found["a"].dtype == getattr(torch, name)
            found["a"].fill_(1)
            found["a"][1, 2] = 0
            found["b"].fill_(1)
        with reader.get(timeout=5.0) as slot, ours.using(slot):
            assert slot["a"].sum() == 11
            assert slot["b"] == 1
            seen = ours.tensors(slot)
            assert seen["a"].to(torch.complex64).sum() == 11
            pointer = slot["a"].data.ptr if device == "cuda" else slot["a"].ctypes.data
            assert seen["a"].data_ptr() == pointer


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_bfloat16_and_float8_are_torchs_own(session: ipcsync.Session, device: str, name: str) -> None:
    pytest.importorskip("ml_dtypes")
    channel = session.create_channel("frames", shape=(5,), dtype=name, depth=2, device=device)
    with channel.reader() as reader, channel.writer() as writer:
        with writer.slot() as slot, ours.using(slot):
            made = ours.as_tensor(slot.array)
            assert made.dtype == getattr(torch, name)
            made.copy_(torch.tensor([1.0, -2.0, 0.5, 4.0, 0.0]))
        with reader.get(timeout=5.0) as slot, ours.using(slot):
            assert ours.as_tensor(slot.array).float().tolist() == [1.0, -2.0, 0.5, 4.0, 0.0]
            host = slot.array if device == "cpu" else slot.array.get()
            assert host.astype("float32").tolist() == [1.0, -2.0, 0.5, 4.0, 0.0]


@pytest.mark.cuda
def test_what_was_shared_is_still_its_owners_tensor(session: ipcsync.Session) -> None:
    mine = {"half": torch.zeros(4, dtype=torch.bfloat16, device="cuda"), "full": torch.zeros(4, device="cuda")}
    shared = session.share("mine", mine)
    with shared.write() as view, ours.using(view):
        assert ours.tensors(view)["half"] is mine["half"]
        mine["half"].fill_(2)
    with session.open_array("mine").read() as view, ours.using(view):
        assert ours.tensors(view)["half"].tolist() == [2.0] * 4


def test_a_tensor_is_itself() -> None:
    tensor = torch.zeros(3)
    assert ours.as_tensor(tensor) is tensor


def test_a_dtype_that_torch_lacks_is_refused(session: ipcsync.Session) -> None:
    pytest.importorskip("ml_dtypes")
    channel = session.create_channel("frames", shape=(5,), dtype="float8_e3m4", depth=2, device="cpu")
    with channel.writer() as writer, writer.slot() as slot:
        with pytest.raises(errors.Unsupported, match="no dtype float8_e3m4"):
            ours.as_tensor(slot.array)
        slot.discard()


def _writes_into_what_it_reads(peer: Peer) -> None:
    with ipcsync.connect() as session, session.open_channel("frames").reader() as reader:
        peer.send("attached")
        with reader.get() as slot:
            ours.as_tensor(slot.array).add_(1)


def test_what_others_read_cannot_be_written(session: ipcsync.Session, spawn: Callable[..., Child]) -> None:
    """As the docstring warns: the reader's process ends, and nobody else sees a changed item."""
    channel = session.create_channel("frames", shape=(5,), dtype="int64", depth=2, device="cpu")
    with channel.reader() as reader, channel.writer() as writer:
        child = spawn(_writes_into_what_it_reads)
        assert child.recv() == "attached"
        with writer.slot() as slot:
            slot.array[...] = 7
        with pytest.raises(AssertionError, match="exit code -11"):
            child.join()
        with reader.get(timeout=5.0) as slot:
            assert slot.array.tolist() == [7] * 5


# -- streams


def test_the_cpu_has_no_streams_of_torchs(session: ipcsync.Session) -> None:
    stream = ipcsync.Stream("cpu")
    with ours.using(stream):
        pass
    with pytest.raises(errors.Unsupported, match="no streams on cpu"):
        ours.to_torch(stream)
    for wrong in (object(), stream):
        with pytest.raises(errors.WrongDevice, match="no CUDA stream"):
            ours.from_torch(wrong)


@pytest.mark.cuda
def test_streams_both_ways() -> None:
    stream = ipcsync.Stream("cuda")
    theirs = ours.to_torch(stream)
    assert theirs.cuda_stream == int(stream._raw)
    back = ours.from_torch(theirs)
    assert back == stream
    with ours.using(stream):
        assert torch.cuda.current_stream().cuda_stream == theirs.cuda_stream
    default = ours.to_torch(ours.from_torch(torch.cuda.default_stream()))
    assert default.cuda_stream == torch.cuda.default_stream().cuda_stream
    made = torch.cuda.Stream()
    event = ours.from_torch(made).record_event()
    event.synchronize()


# -- parameters


def _model() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return model.eval()


def _infers(peer: Peer, device: str) -> None:
    with ipcsync.connect() as session:
        weights, batch = session.open_array("weights"), torch.ones(3, 4, device=device)
        model = _model().to(device)
        for _ in range(3):
            peer.recv()
            with weights.read(timeout=10.0) as view, torch.no_grad():
                answer = torch.func.functional_call(model, ours.tensors(view), (batch,))
                peer.send((view.version, answer.tolist()))


def test_parameters_are_published_where_the_module_trains(
    session: ipcsync.Session, spawn: Callable[..., Child], device: str
) -> None:
    model = _model().to(device)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shared = ours.share(session, "weights", model)
    assert {key: (value == before[key]).all().item() for key, value in model.state_dict().items()} == dict.fromkeys(
        before, True
    )
    child, batch = spawn(_infers, device), torch.ones(3, 4, device=device)
    first = shared.version
    for step in range(3):
        if step:
            with shared.write(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(step)
        child.send(step)
        version, answer = child.recv()
        assert version == first + step
        assert answer == model(batch).tolist()
    child.join()


def test_tied_parameters_stay_tied(session: ipcsync.Session) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)])
    model[1].weight = model[0].weight
    shared = ours.share(session, "weights", model)
    assert list(shared.fields) == ["0.weight"]
    assert model[1].weight is model[0].weight


def test_a_module_without_parameters_has_nothing_to_share(session: ipcsync.Session) -> None:
    with pytest.raises(errors.InvalidArgument, match="no parameters"):
        ours.share(session, "weights", torch.nn.ReLU())


# -- the queue


@pytest.fixture
def queue(session: ipcsync.Session, device: str) -> Iterator[Any]:
    with ours.Queue(session, "frames", like=torch.empty(3, 4, device=device)) as made:
        yield made


def _puts(peer: Peer, queue: Any, device: str, last: str) -> None:
    with queue:
        for n in range(6):
            queue.put(torch.full((3 - n % 3, 4), float(n), device=device), meta={"n": n})
        if last == "raise":
            raise ValueError("no more")
        if last == "kill":
            peer.send("put")
            peer.recv()
            os.kill(os.getpid(), 9)


@pytest.mark.parametrize(("last", "error"), [("end", None), ("raise", errors.PeerFailed), ("kill", errors.PeerDied)])
def test_it_is_handed_to_a_process_that_puts(
    queue: Any, spawn: Callable[..., Child], device: str, last: str, error: type[Exception] | None
) -> None:
    child = spawn(_puts, queue, device, last)
    seen = []
    for n in range(6):
        if n == 5 and last == "kill":
            assert child.recv() == "put"
        with queue.get() as item:
            assert item.meta == {"n": n}
            assert item.tensors.shape == (3 - n % 3, 4)
            assert item.tensors.device.type == device
            seen.append(item.tensors.mean().item())
            item.tensors.zero_()  # it is ours alone
    assert seen == list(range(6))
    if last == "kill":
        child.kill()
    with pytest.raises(error or errors.EndOfStream):
        queue.get()
    if last == "raise":
        with pytest.raises(ValueError, match="no more"):
            child.join()
    assert error is not None or list(queue) == []


def test_fields_by_name_and_any_source(session: ipcsync.Session, device: str) -> None:
    fields = {"ids": torch.empty(2, 3, dtype=torch.int64), "mask": Field((2,), "bool")}
    with ours.Queue(session, "batch", like=fields, device=device) as queue:
        queue._reader = queue.channel.reader(group="queue")
        queue.put({"ids": torch.arange(6).reshape(2, 3), "mask": torch.ones(2, dtype=torch.bool)})
        item = queue.get()
        assert item.tensors["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert item.tensors["mask"].all()
        item.confirm()
        item.release()
        item.release()
        with pytest.raises(errors.InvalidArgument, match="takes a dict of ids, mask, not one tensor"):
            queue.put(torch.zeros(3))
        with pytest.raises(errors.InvalidArgument, match=r"'ids' is torch\.float32"):
            queue.put({"ids": torch.zeros(2, 3), "mask": torch.ones(2, dtype=torch.bool)})
        with pytest.raises(errors.InvalidArgument, match="room for"):
            queue.put({"ids": torch.zeros(2, 4, dtype=torch.int64), "mask": torch.ones(2, dtype=torch.bool)})


def test_parameters_that_need_gradients_can_be_put(session: ipcsync.Session) -> None:
    with ours.Queue(session, "grads", like=torch.empty(2)) as queue:
        queue._reader = queue.channel.reader(group="queue")
        queue.put(torch.nn.Parameter(torch.ones(2)))
        with queue.get() as item:
            assert item.tensors.tolist() == [1.0, 1.0]


def test_put_waits_for_somebody_who_gets(queue: Any) -> None:
    with pytest.raises(errors.WaitTimeout, match="nobody gets from 'frames'"):
        queue.put(torch.zeros(3, 4), timeout=0.05)


def test_a_queue_that_nobody_made_is_not_found(session: ipcsync.Session) -> None:
    with pytest.raises(errors.NotFound, match="nowhere"):
        ours.Queue(session, "nowhere", timeout=0.05)


def test_it_pickles_as_its_name(queue: Any) -> None:
    again = pickle.loads(pickle.dumps(queue))
    assert (again.name, again.channel.fields) == (queue.name, queue.channel.fields)
    assert again.session is not queue.session
    again.close()
    assert again.session.closed


def _gets(peer: Peer, queue: Any) -> int:
    with queue:
        return sum(1 for _ in queue)


def test_each_item_goes_to_one_receiver(session: ipcsync.Session, spawn: Callable[..., Child]) -> None:
    with ours.Queue(session, "frames", like=torch.empty(4)) as queue:
        children = [spawn(_gets, queue) for _ in range(2)]
        for n in range(50):
            queue.put(torch.full((4,), float(n)))
        queue._writer.close()
        assert sum(child.join() for child in children) == 50
