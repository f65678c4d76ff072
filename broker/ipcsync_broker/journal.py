"""The journal: what a restarted broker knows of its sessions and things. One file beside the ledger.

It is made with its space reserved, so that a full tmpfs cannot lose a record. A record is appended, and then its length
and checksum before it; of one that a death cut short there is no length, and nothing that followed from it was done:
journal, then ledger, then reply (LEDGER.md rule 12). One that does not match its checksum was damaged, and then nothing
in the file is believed: what came after it may be anything. A full journal is written anew, complete, and renamed over
the old one.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from ipcsync.errors import OutOfSpace
from ipcsync.shm import Region

from .model import Entity, Session, Thing

MAGIC = b"IPCSJNL1"
NBYTES = 1 << 20
_HEAD = struct.Struct("<8sQ")  # magic, inode of the ledger that it belongs to
_RECORD = struct.Struct("<II")  # length, crc32 of the payload


class Last(msgspec.Struct):
    """The highest numbers ever given out: none is given twice in the life of a ledger."""

    session: int = 0
    incarnation: int = 0


class Change(msgspec.Struct, array_like=True):
    """An entity as it is now; neither record: it is no more."""

    kind: Literal["session", "thing"]
    id: int
    session: Session | None = None
    thing: Thing | None = None


class Entry(msgspec.Struct, array_like=True):
    """The changes of one turn of the broker, whole or not at all."""

    changes: list[Change]
    last: Last


Entities = dict[Entity, Session | Thing]
_DECODER = msgspec.msgpack.Decoder(Entry)


def dumps(changes: Mapping[Entity, Session | Thing | None], last: Last) -> bytes:
    entry = Entry([], last)
    for (kind, id), record in changes.items():
        if isinstance(record, Session):  # the things say who has them open
            session = msgspec.structs.replace(record, attached=set(), away=False)
            entry.changes.append(Change(kind, id, session=session))
        else:
            entry.changes.append(Change(kind, id, thing=record))
    return msgspec.msgpack.encode(entry)


def enter(entities: Entities, payload: bytes) -> Last:
    """Does to `entities` what an entry says."""
    entry = _DECODER.decode(payload)
    for change in entry.changes:
        record = change.session or change.thing
        if record is None:
            entities.pop((change.kind, change.id), None)
        else:
            entities[change.kind, change.id] = record
    return entry.last


class Journal:
    """Open for appending. ``entities`` and ``last`` are as the entries so far say."""

    def __init__(
        self, path: Path, ledger_inode: int, entities: Entities | None = None, last: Last | None = None
    ) -> None:
        self.path, self.inode = path, ledger_inode
        self.entities: Entities = dict(entities or {})
        self.last = last or Last()
        self._region: Region | None = None
        self._end = 0
        self.behind = False  # it does not say how things are: there was no room
        self._rewrite()

    @classmethod
    def read(cls, path: Path, ledger_inode: int) -> tuple[Entities, Last] | None:
        """What the journal of that ledger says; None when there is none, or it is another ledger's.

        ``ValueError`` when it is damaged.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) < _HEAD.size or _HEAD.unpack_from(data) != (MAGIC, ledger_inode):
            return None
        entities: Entities = {}
        last = Last()
        for payload in _payloads(data):
            last = enter(entities, payload)
        return entities, last

    def append(self, changes: Mapping[Entity, Session | Thing | None]) -> None:
        """The entry is in the file when this returns (in the page cache: it outlives us, not the machine)."""
        for (kind, id), record in changes.items():
            if record is None:
                self.entities.pop((kind, id), None)
            else:
                self.entities[kind, id] = record
            if kind == "session":
                self.last.session = max(self.last.session, id)
            else:
                self.last.incarnation = max(self.last.incarnation, id)
        if self.behind:
            raise OutOfSpace(f"{self.path} is behind until there is room for it", path=str(self.path))
        payload = dumps(changes, self.last)
        assert self._region is not None
        if self._end + _RECORD.size + len(payload) > self._region.nbytes:
            self._rewrite()
            return
        self._end = _put(self._region, self._end, payload)

    def _rewrite(self) -> None:
        """Everything that stands, in a new file, with room for three times as much. ``OutOfSpace`` leaves the old."""
        payload = dumps(self.entities, self.last)
        nbytes = max(NBYTES, 4 * len(payload))
        end = _HEAD.size

        def fill(region: Region) -> None:
            nonlocal end
            region.bytes[: _HEAD.size] = _HEAD.pack(MAGIC, self.inode)
            end = _put(region, end, payload)

        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)
        self.behind = True
        region = Region.create(fresh, nbytes, fill)
        os.replace(fresh, self.path)
        self.close()
        self._region, self._end, self.behind = region, end, False

    def catch_up(self) -> None:
        """Writes what there was no room for; ``OutOfSpace`` when there still is none."""
        if self.behind:
            self._rewrite()

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None


def _put(region: Region, end: int, payload: bytes) -> int:
    """Appends a record at `end`, its checksum last; returns the new end."""
    at = end + _RECORD.size
    region.bytes[at : at + len(payload)] = payload
    region.bytes[end:at] = _RECORD.pack(len(payload), zlib.crc32(payload))
    return at + len(payload)


def _payloads(data: bytes) -> Iterator[bytes]:
    at = _HEAD.size
    while at + _RECORD.size <= len(data):
        length, crc = _RECORD.unpack_from(data, at)
        payload = data[at + _RECORD.size : at + _RECORD.size + length]
        if length == 0:
            return  # the end, perhaps with an entry behind it that a death cut short: its head is written last
        if len(payload) != length or zlib.crc32(payload) != crc:
            raise ValueError(f"the entry at byte {at} is damaged")
        yield payload
        at += _RECORD.size + length
