"""The journal: what a restarted broker knows of its sessions and things. One file beside the ledger.

It is made with its space reserved, so that a full tmpfs cannot lose a record. A record is appended with its length and
checksum; one that a death cut short does not match its checksum, and nothing that followed from it was done: journal,
then ledger, then reply (LEDGER.md rule 12). A full journal is written anew, complete, and renamed over the old one.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ipcsync.shm import Region

from .model import Session, Thing

MAGIC = b"IPCSJNL1"
NBYTES = 1 << 20
_HEAD = struct.Struct("<8sQ")  # magic, inode of the ledger that it belongs to
_RECORD = struct.Struct("<II")  # length, crc32 of the payload
Kind = Literal["session", "thing", "last"]


class Last(msgspec.Struct):
    """The highest numbers ever given out: none is given twice in the life of a ledger."""

    session: int
    incarnation: int


Record = Session | Thing | Last | None
Entities = dict[tuple[Kind, int], Record]
_TYPES: dict[Kind, type[Session] | type[Thing] | type[Last]] = {"session": Session, "thing": Thing, "last": Last}
_ENVELOPE = msgspec.msgpack.Decoder(tuple[Kind, int, msgspec.Raw])


def dumps(kind: Kind, id: int, record: Record) -> bytes:
    if isinstance(record, Session):
        record = msgspec.structs.replace(record, attached=set(), away=False)  # the things say who has them open
    return msgspec.msgpack.encode((kind, id, record))


def loads(payload: bytes) -> tuple[Kind, int, Record]:
    kind, id, raw = _ENVELOPE.decode(payload)
    found: Record = msgspec.msgpack.decode(raw, type=_TYPES[kind] | None)
    return kind, id, found


class Journal:
    """Open for appending. ``entities`` are the records as they stand."""

    def __init__(self, path: Path, ledger_inode: int, entities: Entities | None = None) -> None:
        self.path, self.inode = path, ledger_inode
        self.entities: Entities = entities or {}
        self._region: Region | None = None
        self._end = 0
        self._rewrite()

    @classmethod
    def read(cls, path: Path, ledger_inode: int) -> Entities | None:
        """What the journal of that ledger says; None when there is none, or it is another ledger's."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) < _HEAD.size or _HEAD.unpack_from(data) != (MAGIC, ledger_inode):
            return None
        entities: Entities = {}
        for payload in _payloads(data):
            kind, id, record = loads(payload)
            _enter(entities, kind, id, record)
        return entities

    def append(self, kind: Kind, id: int, record: Record) -> None:
        """The record is in the file when this returns (in the page cache: it outlives us, not the machine)."""
        _enter(self.entities, kind, id, record)
        payload = dumps(kind, id, record)
        assert self._region is not None
        if self._end + _RECORD.size + len(payload) > self._region.nbytes:
            self._rewrite()
            return
        self._end = _put(self._region, self._end, payload)

    def _rewrite(self) -> None:
        """Everything that stands, in a new file, with room for three times as much. ``OutOfSpace`` leaves the old."""
        payloads = [dumps(kind, id, record) for (kind, id), record in self.entities.items()]
        nbytes = max(NBYTES, 4 * sum(len(p) + _RECORD.size for p in payloads))
        end = _HEAD.size

        def fill(region: Region) -> None:
            nonlocal end
            region.bytes[: _HEAD.size] = _HEAD.pack(MAGIC, self.inode)
            for payload in payloads:
                end = _put(region, end, payload)

        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)
        region = Region.create(fresh, nbytes, fill)
        os.replace(fresh, self.path)
        self.close()
        self._region, self._end = region, end

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None


def _enter(entities: Entities, kind: Kind, id: int, record: Record) -> None:
    """What a record does to those before it; the highest numbers are kept when their owners are no more."""
    if record is None:
        entities.pop((kind, id), None)
    else:
        entities[kind, id] = record
    last = entities.setdefault(("last", 0), Last(0, 0))
    assert isinstance(last, Last)
    if kind == "session":
        last.session = max(last.session, id)
    elif kind == "thing":
        last.incarnation = max(last.incarnation, id)


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
        if length == 0 or len(payload) != length or zlib.crc32(payload) != crc:
            return
        yield payload
        at += _RECORD.size + length
