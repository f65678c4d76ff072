"""What really exists: the ledger, control files, memory and CUDA events; and what of the world decisions look at.

Effects on words and small files are carried out at once, on the broker's loop. Those that may take long (a device, a
large allocation) say so in :meth:`Resources.slow` and run on the server's worker thread.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipcsync import condemn, errors, failpoints, life, linux, ring, wire
from ipcsync.backends import host_events
from ipcsync.ledger import BLOCK_WORDS, FOREVER, Block, Cell, Header, Ledger

from .model import (
    Build,
    Built,
    CondemnCells,
    DropReader,
    Effect,
    EndStream,
    Free,
    FreeCell,
    JoinRing,
    Mirror,
    NewEpoch,
    OpenCell,
    RetireCell,
    Scavenge,
    Session,
    SetBlock,
    SetPen,
    StaleCell,
    Thing,
)  # fmt: skip

if TYPE_CHECKING:
    from ipcsync.backends.base import Backend, Memory, RawEvent

    from .doors import Pulse

LARGE = 1 << 20  # bytes from which an allocation is not made on the loop
CUDA_EVENTS = 4096  # live interprocess events of one process: CUDA's own limit


def failpoint(name: str) -> None:
    if failpoints.ARMED:
        failpoints.hit(name)


@cache
def backend(device: str) -> tuple[Backend, int]:
    """The backend of a device as the wire names it ("cpu", or a GPU's UUID), and its ordinal here."""
    from ipcsync.backends import select

    if device == "cpu":
        return select.backend("cpu"), 0
    cuda = select.backend("cuda")
    return cuda, cuda.index(device)


class Resources:
    """Also the ``Facts`` that decisions read."""

    def __init__(self, directory: Path, ledger: Ledger) -> None:
        self.directory, self.ledger = directory, ledger
        self.words = ledger.words
        self.pulse: Pulse | None = None  # the server's
        self.controls: dict[int, ring.Control] = {}  # by incarnation
        self.memory: dict[int, Memory] = {}
        self.events: dict[int, RawEvent] = {}
        self.released: set[int] = set()  # retired cells whose words are released again at each tick

    # -- facts

    def issued(self, cell: int) -> int:
        return int(self.words[self.ledger.cell(cell) + Cell.ISSUED])

    def drained(self, cell: int) -> bool:
        words, at = self.words, self.ledger.cell(cell)
        begun = words[at + Cell.ISSUED]
        if words[at + Cell.VERDICT] == FOREVER:  # else a refused record may have left its intent behind
            begun = max(begun, words[at + Cell.INTENT])
        return bool(words[at + Cell.WORD] >= begun)

    def verdict(self, cell: int) -> int:
        return int(self.words[self.ledger.cell(cell) + Cell.VERDICT])

    def opened(self, thing: Thing) -> bool:
        if self.words[self.ledger.cell(thing.cell) + Cell.INCARNATION] != thing.incarnation:
            return False
        if thing.channel is None:
            return True
        return bool(self.controls[thing.incarnation].words[ring.Head.EPOCH] == thing.epoch)

    def held(self, thing: Thing) -> bool:
        return not thing.nbytes or thing.incarnation in self.memory

    def readers(self, thing: Thing) -> set[int]:
        control = self.controls[thing.incarnation]
        state = ring.Reader.STATE
        return {c for c in range(control.max_readers) if control.words[control.reader(c) + state] != ring.Reader.FREE}

    def stream_open(self, thing: Thing) -> bool:
        return bool(self.controls[thing.incarnation].words[ring.Head.END_AT] == 0)

    def highest_item(self, thing: Thing) -> int:
        at = self.ledger.cell(thing.cell)
        begun = max(int(self.words[at + Cell.INTENT]), int(self.words[at + Cell.ISSUED]))
        return max(begun, ring.highest_item(self.controls[thing.incarnation]))

    def dying(self, block: int) -> bool:
        return self.ledger.dying(block)

    def block_session(self, block: int) -> int:
        at = self.ledger.block(block)
        return int(self.words[at + Block.SESSION]) if self.words[at + Block.STATE] != Block.FREE else 0

    def closed(self, block: int) -> bool:
        return self.words[self.ledger.block(block) + Block.LIFE] & 0xFFFFFFFF == 0

    def beat(self, block: int) -> int:
        return int(self.words[self.ledger.block(block) + Block.BEAT])

    def waiting(self, block: int) -> bool:
        words, ledger = self.words, self.ledger
        return any(words[ledger.cell(cell) + Cell.WORD] < round for cell, round in ledger.waits(block))

    def holder(self, lock: str) -> int | None:
        return life.holder(self.directory / lock) if lock else 0

    def silent(self, lock: str) -> bool:
        return bool(lock) and self.pulse is not None and self.pulse.lost(lock)

    def process(self, pid: int) -> tuple[str, int, int] | None:
        found = linux.process_state(pid)
        if found is None or found[0] in "ZX":
            return None
        uid = linux.process_uid(pid)  # the owner of /proc/PID is root for a process that changed its uid
        return None if uid is None else (*found, uid)

    # -- effects

    def slow(self, effect: Effect) -> bool:
        if isinstance(effect, Build | Free):
            return effect.thing.device != "cpu" or effect.thing.nbytes >= LARGE
        return False

    def apply(self, effect: Effect) -> Any:
        """Carries an effect out; what it answers is said where it is defined."""
        words = self.words
        match effect:
            case OpenCell(cell, incarnation, base, name, mirror):
                self.ledger.open_cell(cell, incarnation, flags=Cell.MIRROR if mirror else 0, base=base, name=name)
            case SetPen(cell, block):
                words[self.ledger.cell(cell) + Cell.RECORDER] = 0 if block is None else block + 1
            case RetireCell(cell):
                words[self.ledger.cell(cell) + Cell.STATE] = Cell.RETIRED
                if words[self.ledger.cell(cell) + Cell.FLAGS] & Cell.RELEASE:
                    self.released.add(cell)
            case StaleCell(cell):
                words[self.ledger.cell(cell) + Cell.INCARNATION] = 0
            case FreeCell(cell):
                self.released.discard(cell)
                at = self.ledger.cell(cell)
                words[at + Cell.RECORDER] = words[at + Cell.INCARNATION] = 0
                words[at + Cell.STATE] = Cell.FREE
            case Mirror(cell):
                words[self.ledger.cell(cell) + Cell.FLAGS] |= Cell.MIRROR
            case SetBlock():
                self._set_block(effect)
            case CondemnCells():
                return self._condemn(effect)
            case Build(thing):
                return self._build(thing)
            case Free(thing):
                self._free(thing)
            case NewEpoch(thing, old_cell, base):
                first_bad = words[self.ledger.cell(old_cell) + Cell.VERDICT]
                ring.new_epoch(
                    self.controls[thing.incarnation],
                    cell=thing.cell,
                    incarnation=thing.incarnation,
                    base=base,
                    first_bad=first_bad,
                )
            case EndStream(thing, session, reason):
                pid, name = (session.pid, session.name) if session else (0, "")
                ring.end(self.controls[thing.incarnation], self.ledger, reason, pid=pid, session=name)
            case JoinRing(thing, session, body):
                return self._join(thing, session, body)
            case DropReader(thing, cell, how):
                self._drop_reader(self.controls[thing.incarnation], cell, how)
            case Scavenge(session, process_gone):
                self._scavenge(session, process_gone)
        return None

    def tick(self) -> None:
        """Words released by force are released again: a dying GPU context may have written over them."""
        for cell in self.released:
            condemn.release_word(self.ledger, cell)

    def retired(self) -> None:
        """After a take-over: the words that the dead broker released by force."""
        words, ledger = self.words, self.ledger
        for cell in range(words[Header.CELLS_USED]):
            at = ledger.cell(cell)
            if words[at + Cell.STATE] == Cell.RETIRED and words[at + Cell.FLAGS] & Cell.RELEASE:
                self.released.add(cell)

    def _set_block(self, effect: SetBlock) -> None:
        words, at, session = self.words, self.ledger.block(effect.block), effect.session
        if effect.state == "live" and session is not None:
            for i in range(BLOCK_WORDS):
                words[at + i] = 0
            words[at + Block.SESSION], words[at + Block.PID] = session.number, session.pid
            words[at + Block.START] = session.start
            self.ledger.write_text(at + Block.NAME, session.name)
            words[at + Block.STATE] = Block.LIVE
        elif effect.state == "leased":
            words[at + Block.LEASE] = 1
        else:
            words[at + Block.STATE] = Block.DYING if effect.state == "dying" else Block.FREE

    def _condemn(self, effect: CondemnCells) -> dict[int, int]:
        culprit = effect.culprit
        who = (culprit.number, culprit.pid, culprit.name) if culprit else ()
        report = condemn.condemn(
            self.ledger, effect.cells, condemn.Culprit(effect.cause, *who), release=True, failpoint=failpoint
        )
        return report.verdicts

    # -- taking over

    def reopen(self, thing: Thing) -> None:
        """Opens anew what a dead broker made for `thing`; raises what keeps it from being had."""
        if thing.spec is not None:
            self.controls[thing.incarnation] = ring.open_control(self.directory / thing.control)
        if thing.nbytes:
            info = thing.memory[0]
            try:
                on, index = backend(thing.device)
                self.memory[thing.incarnation] = on.open_memory(index, info.handle, info.nbytes, writable=True)
            except (errors.DeviceUnavailable, errors.HandleInvalid, FileNotFoundError):
                if not thing.attached:
                    raise
                # It lives as long as somebody has it mapped, and they go on. Who comes now is told by its own attempt.
        if thing.handle:
            on, index = backend(thing.device)
            self.events[thing.incarnation] = on.event_open(index, thing.handle)

    # -- building and freeing

    def _build(self, thing: Thing) -> Built:
        failpoint("broker.before-export")
        try:
            built = self._event(thing) if thing.kind == "event" else self._storage(thing)
        except BaseException:
            self._free(thing)
            raise
        failpoint("broker.after-export")
        return built

    def _event(self, thing: Thing) -> Built:
        try:
            cuda, index = backend(thing.device)
        except errors.DeviceUnavailable:
            if thing.via == "auto":
                return Built("timeline")  # a broker that sees no GPU serves timelines
            raise
        if len(self.events) >= CUDA_EVENTS:
            raise errors.QuotaExceeded(
                f'CUDA has {CUDA_EVENTS} interprocess events for one process: let some go, or use via="timeline"',
                resource="cuda-events",
                limit=CUDA_EVENTS,
            )
        event = cuda.event_create(index, timing=False, blocking=False, interprocess=True)
        self.events[thing.incarnation] = event
        return Built(thing.via, cuda.event_export(event))

    def _storage(self, thing: Thing) -> Built:
        """Memory first: it is what may not fit."""
        memory = thing.memory
        if thing.spec is not None and thing.spec.memory == "broker":
            on, index = backend(thing.device)
            try:
                made = on.allocate(index, thing.nbytes, f"mem-{thing.incarnation}")
            except (OverflowError, MemoryError, OSError) as error:
                if isinstance(error, errors.IpcSyncError):
                    raise
                raise errors.OutOfSpace(
                    f"{thing.nbytes} bytes for {thing.name!r} cannot be had: {error}", needed=thing.nbytes
                ) from None
            self.memory[thing.incarnation] = made
            memory = (wire.MemoryInfo(made.handle, made.nbytes, thing.device),)
        path = self.directory / thing.control
        if isinstance(thing.spec, wire.ChannelSpec):
            control = ring.create(path, thing.spec, cell=thing.cell, incarnation=thing.incarnation)
        else:
            assert isinstance(thing.spec, wire.ArraySpec)
            control = ring.create_array(path, thing.spec)
        self.controls[thing.incarnation] = control
        return Built("timeline", b"", memory)

    def _free(self, thing: Thing) -> None:
        control = self.controls.pop(thing.incarnation, None)
        if control is not None:
            control.region.path.unlink(missing_ok=True)
            control.region.close()
        if thing.incarnation in self.memory:
            backend(thing.device)[0].free(self.memory.pop(thing.incarnation))
            (self.directory / f"mem-{thing.incarnation}").unlink(missing_ok=True)  # opened, not made, by a later broker
        if thing.incarnation in self.events:
            backend(thing.device)[0].event_destroy(self.events.pop(thing.incarnation))

    # -- readers

    def _join(self, thing: Thing, session: Session, body: wire.JoinReader) -> wire.ReaderReply:
        failpoint("broker.attach")
        control = self.controls[thing.incarnation]
        cell = ring.free_reader(control)
        if cell is None:
            raise errors.QuotaExceeded(
                f"{thing.name!r} has max_readers={control.max_readers} readers: create it with more",
                resource="readers",
                limit=control.max_readers,
            )
        if thing.kind == "array":
            ring.join_array(control, cell, block=session.block)
            return wire.ReaderReply(cell, 0)
        group = 0 if body.group is None else group_number(body.group)
        first = ring.join(
            control, self.ledger, cell, block=session.block, policy=body.policy, start=body.start, group=group
        )
        return wire.ReaderReply(cell, first)

    def _drop_reader(self, control: ring.Control, cell: int, how: str) -> None:
        if how == "left":
            ring.leave(control, cell)
        elif how == "silent":
            ring.retire(control, cell)
        else:
            ring.drop(control, cell)
            if how == "gone":
                ring.leave(control, cell)

    # -- files of the dead

    def _scavenge(self, session: Session, process_gone: bool) -> None:
        for path in self.directory.glob(f"smem-{session.number}-*"):
            path.unlink(missing_ok=True)
        if session.lock:
            if self.pulse is not None:
                self.pulse.forget(session.lock)
            (self.directory / session.lock).unlink(missing_ok=True)
        if process_gone:
            host_events.sweep(self.directory)
            life.sweep(self.directory)


def group_number(name: str) -> int:
    """A reader group as a word of a reader's cell: the same in every process, never 0."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1
