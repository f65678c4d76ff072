"""For torch users: slots as tensors, torch's streams, a module's parameters as a shared array, and a queue of tensors.

Loaded only when it is imported or first used (``ipcsync.torch``), since it loads torch. Everything works on CUDA and on
the CPU. Nothing here copies but ``Queue.put``, once, and ``share`` where it has to move parameters.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

try:
    import torch
except ImportError as error:
    raise ImportError(f"ipcsync.torch needs torch ({error}): pip install torch") from error

from .device import Device, parse
from .dtypes import dtype_name
from .errors import EndOfStream, InvalidArgument, Unsupported, WaitTimeout, WrongDevice
from .fields import SINGLE, Field
from .ring import Reader as Cells
from .session import Session, connect
from .stream import Stream, locate
from .waiting import UNSET, Deadline, Timeout

if TYPE_CHECKING:
    from .channel_reader import Reader
    from .channel_writer import Writer
    from .shared_array import SharedArray
    from .slot import ReadSlot, Slot

__all__ = ["Item", "Queue", "as_tensor", "from_torch", "share", "tensors", "to_torch", "using"]

_BITS = {1: ("uint8", torch.uint8), 2: ("int16", torch.int16)}  # what numpy and DLPack carry bfloat16 and float8 as


def as_tensor(array: Any) -> Any:
    """A tensor over the memory of a NumPy or CuPy array: same shape, strides and dtype (elements), no copy.

    torch knows no read-only tensors: writing through one over a *reader's* host slot ends the process with SIGSEGV.
    ``clone()`` it first. On CUDA torch's current stream waits for CuPy's. ``Unsupported``: a dtype that torch lacks.
    """
    if isinstance(array, torch.Tensor):  # what was given to session.share, in its owner's `write`
        return array
    name = dtype_name(array.dtype)
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise Unsupported(f"torch {torch.__version__} has no dtype {name}: use another for this field")
    extended = name.startswith(("bfloat16", "float8"))
    if extended:
        bits, _ = _BITS[array.dtype.itemsize]
        array = array.view(bits)
    if hasattr(array, "__cuda_array_interface__"):
        made = torch.from_dlpack(array)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of memory that is not writable: said above
            made = torch.from_numpy(array)
    return made.view(kind) if extended else made


def tensors(slot: Slot) -> dict[str, Any]:
    """The fields of a slot, or of a shared array's view, as tensors by name, over the memory itself.

    Valid as long as the slot's turn. See :func:`as_tensor` for what a reader must not do on the host::

        with reader.get() as slot, ipcsync.torch.using(slot):
            scores = model(ipcsync.torch.tensors(slot)["frames"])
    """
    return {name: as_tensor(slot[name]) for name in slot}


# -- streams, both ways


def to_torch(stream: Stream) -> Any:
    """A CUDA stream of ours as ``torch.cuda.Stream``: the same queue, which ours must outlive.
    ``Unsupported`` on the CPU, where torch has no streams."""
    if stream.device.type != "cuda":
        raise Unsupported(f"torch has no streams on {stream.device}: use `with ipcsync.torch.using(stream):`")
    made = _external(int(stream._raw), stream.device.index)
    made.ipcsync = stream  # keeps it
    return made


def _external(pointer: int, device: int) -> Any:
    if pointer <= 1:  # the legacy default stream, which torch knows as 0
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device=device)


def from_torch(stream: Any) -> Stream:
    """A ``torch.cuda.Stream`` (or ``torch.Stream``) as ours, for ``with stream:``, ``enqueue`` and ``wait_event``.
    As an argument ``stream=`` torch's own is welcome as it is. ``WrongDevice``: it is no CUDA stream."""
    if not isinstance(stream, torch.Stream) or stream.device.type != "cuda":
        raise WrongDevice(f"{stream!r} is no CUDA stream of torch's: pass a torch.cuda.Stream")
    raw, device = locate(stream, "cuda")
    return Stream._of(device, raw)


@contextlib.contextmanager
def using(what: Slot | Stream) -> Iterator[None]:
    """Makes a slot's stream, or a stream of ours, torch's current one for the block; on the CPU there is nothing to do.

    What torch computes in it is then in order with the slot's turn. Not needed where the slot was taken on torch's own
    current stream, as with ``connect(streams="torch")``.
    """
    if isinstance(what, Stream):
        made = to_torch(what) if what.device.type == "cuda" else None
    else:
        where = getattr(next(iter(what._mine().values())), "device", "cpu")
        kind, index = parse("cpu" if where == "cpu" else where)  # numpy's is a text; CuPy's and torch's are objects
        made = _external(int(what._raw), index or 0) if kind == "cuda" else None
    if made is None:
        yield
        return
    with torch.cuda.stream(made):
        yield


def _current(device: Device) -> Any:
    """torch's current stream there, as a ``stream=`` argument."""
    return torch.cuda.current_stream(device.index) if device.type == "cuda" else None


# -- parameters


def share(session: Session, name: str, module: Any, *, move: bool | None = None, **options: Any) -> SharedArray:
    """Publishes a module's parameters and buffers under one name, by their names in the module: train inside
    ``with shared.write():`` and each step is a version.

    On CUDA they stay where they are (``session.share``; ``NotExportable`` says why if torch's allocator does not allow
    it). With ``move=True``, and always on the CPU, whose private memory cannot be shared, they are moved once into
    memory of the broker's (``session.create_array``) and the module uses that from then on; this is version 1. Do
    not close the session while the module is in use. `options` are those of the method named.
    """
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not found:
        raise InvalidArgument(f"{type(module).__name__} has no parameters to share")
    where = next(iter(found.values())).device
    if move is None:
        move = where.type == "cpu"
    if not move:
        return session.share(name, {key: tensor.detach() for key, tensor in found.items()}, **options)
    fields = {key: Field(tensor.shape, tensor.dtype) for key, tensor in found.items()}
    shared = session.create_array(name, fields, device=where, **options)
    with shared.write(_current(shared.device)) as view, torch.no_grad():
        for key, place in tensors(view).items():
            place.copy_(found[key])
            found[key].data = place
    return shared


# -- a queue of tensors


class Item:
    """What ``Queue.get`` gives: ``tensors`` as they were put (one, or a dict by name) and ``meta`` (a dict).

    The tensors lie in the queue's own memory, which is given back by ``release()`` or at the end of a ``with`` block:
    ``clone()`` what is to be kept. Until then they are this receiver's alone, to write into as well.
    """

    def __init__(self, slot: ReadSlot, single: bool) -> None:
        self._slot = slot
        found = tensors(slot)
        self.tensors: Any = found[SINGLE] if single else found
        self.meta: dict[str, Any] = slot.meta
        self.number = slot.number

    def confirm(self, timeout: Timeout = UNSET) -> None:
        """Waits until the item is complete, `timeout` seconds at most; ``PeerDied`` if it will never be."""
        self._slot.confirm(timeout)

    def release(self) -> None:
        """Gives the memory back, once torch's work on it so far is done. Idempotent."""
        self.tensors = None
        self._slot.release()

    def __enter__(self) -> Item:
        self._slot.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.tensors = None
        self._slot.__exit__(kind, error, trace)


class Queue:
    """A queue of tensors between processes, for ``torch.multiprocessing.Queue``: one copy, into shared memory.

    `like`: a tensor or :class:`Field`, or a dict of them, whose shapes are the greatest and whose dtypes are the only
    ones that can be put; the process that gives it creates the queue (or finds it as it would have made it). Without,
    the queue `name` is opened. `depth`: how many items it holds. It may be handed to a spawned process as an argument.

    One process puts. Each item goes to one of those that get, and is lost with a receiver that dies while it has it,
    since that may have written into it. Work is on torch's current stream, which nobody waits for on the host. The end
    of the ``with`` block of whoever puts ends the queue: receivers get ``EndOfStream``, or ``PeerFailed`` if an
    exception ended it, or ``PeerDied``.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        like: Any = None,
        *,
        depth: int = 4,
        meta_bytes: int = 4096,
        device: Any = None,
        timeout: Timeout = UNSET,
    ) -> None:
        self.session, self.name = session, name
        self._own_session = False
        if like is None:
            self.channel = session.open_channel(name, timeout=timeout)
        else:
            given = dict(like) if isinstance(like, Mapping) else {SINGLE: like}
            devices = {str(t.device) for t in given.values() if not isinstance(t, Field)}
            if device is None and len(devices) == 1:
                device = devices.pop()
            fields = {k: t if isinstance(t, Field) else Field(t.shape, t.dtype) for k, t in given.items()}
            self.channel = session.create_channel(
                name,
                fields=fields,
                depth=depth,
                meta_bytes=meta_bytes,
                device=device,
                redeliver=False,
                exist_ok=True,
                timeout=timeout,
            )
        self._single = list(self.channel.fields) == [SINGLE]
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.session.runtime), self.session.namespace, self.name)

    def __repr__(self) -> str:
        return f"<ipcsync.torch.Queue {self.name!r} on {self.channel.device}>"

    def put(self, tensors: Any, meta: Mapping[str, Any] | None = None, *, timeout: Timeout = UNSET) -> None:
        """Copies a tensor, or a dict of them, into the queue; they may be smaller than the queue was made for, and on
        any device. `meta`: a small map of plain values.

        Waits, `timeout` seconds at most (``WaitTimeout``), while nobody gets, and while the queue is full.
        ``RecorderBusy``: another process puts. ``InvalidArgument``: other names, shapes or dtypes than `like`'s.
        """
        given = tensors if isinstance(tensors, Mapping) else {SINGLE: tensors}
        fields = self.channel.fields
        if given.keys() != fields.keys():
            raise InvalidArgument(f"{self.name!r} takes {_said(fields)}, not {_said(given)}")
        for key, tensor in given.items():
            if dtype_name(tensor.dtype) != fields[key].dtype:
                raise InvalidArgument(f"{key!r} is {tensor.dtype}, and {self.name!r} takes {fields[key].dtype}")
        deadline = self.session.deadline(timeout)
        with self._lock:
            if self._writer is None:
                self._writer = self.channel.writer(timeout=_left(deadline))
        self._await_receiver(deadline)
        stream, cuda = _current(self.channel.device), self.channel.device.type == "cuda"
        with self._writer.slot(stream, meta, timeout=_left(deadline)) as slot:
            for key, tensor in given.items():
                if tuple(tensor.shape) != fields[key].shape:
                    slot.resize(key, tuple(tensor.shape))
                as_tensor(slot[key]).copy_(tensor.detach(), non_blocking=cuda)

    def _await_receiver(self, deadline: Deadline) -> None:
        """A channel keeps nothing for readers that are yet to come; a queue is expected to."""
        control = self.channel.control
        states = [control.reader(cell) + Cells.STATE for cell in range(control.max_readers)]
        while True:
            self.session.check()  # before its memory is looked at
            if any(control.words[state] == Cells.ACTIVE for state in states):
                return
            if deadline.left() == 0.0:
                raise WaitTimeout(f"nobody gets from {self.name!r}: start a receiver", timeout=deadline.timeout)
            time.sleep(1e-3)

    def get(self, timeout: Timeout = UNSET) -> Item:
        """The next item, without a copy: ``with queue.get() as item: use(item.tensors, item.meta)``.

        Waits `timeout` seconds at most (``WaitTimeout``). ``EndOfStream`` after the last one, ``PeerDied`` or
        ``PeerFailed`` when its producer died or was ended by an exception.
        """
        deadline = self.session.deadline(timeout)
        with self._lock:
            if self._reader is None:
                self._reader = self.channel.reader(group="queue", timeout=_left(deadline))
                # Of a group's readers an item is one's alone: it may write into it, as into any tensor of its own.
                self._reader._use(self.channel.views(writable=True))
        return Item(self._reader.get(_current(self.channel.device), _left(deadline)), self._single)

    def __iter__(self) -> Iterator[Item]:
        """Every item until the producer ends the queue, each released when its turn of the loop ends."""
        while True:
            try:
                item = self.get()
            except EndOfStream:
                return
            with item:
                yield item

    def close(self, timeout: Timeout = UNSET) -> None:
        """Leaves: whoever put ends the queue by it. Idempotent."""
        self.channel.close(timeout)
        if self._own_session:
            self.session.close(timeout)

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)  # which knows what an exception means
        self.close()


def _reopen(endpoint: str, namespace: str, name: str) -> Queue:
    """A queue that was an argument of this process, in a session of its own."""
    queue = Queue(connect(endpoint, namespace=namespace), name)
    queue._own_session = True
    return queue


def _left(deadline: Deadline) -> float | None:
    return None if deadline.at is None else deadline.left(threading.TIMEOUT_MAX)


def _said(fields: Mapping[str, Any]) -> str:
    return "one tensor" if list(fields) == [SINGLE] else f"a dict of {', '.join(fields)}"
