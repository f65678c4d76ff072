"""docs/protocol.md is the wire's normative text: its byte vectors and its tables are checked against the code here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest

from ipcsync import errors, wire

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "protocol.md").read_text()
VECTORS: list[dict[str, Any]] = json.loads((DOCS / "protocol" / "vectors.json").read_text())
NAMES = [vector["name"] for vector in VECTORS]


def from_json(value: Any) -> Any:
    """JSON has no bytes: {"$hex": "..."} stands for them."""
    if isinstance(value, dict):
        return bytes.fromhex(value["$hex"]) if set(value) == {"$hex"} else {k: from_json(v) for k, v in value.items()}
    return [from_json(v) for v in value] if isinstance(value, list) else value


def builtins(struct: msgspec.Struct) -> Any:
    return msgpack.unpackb(wire.encode(struct), raw=False)


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_vector(vector: dict[str, Any]) -> None:
    """Bytes, value and typed message are one, in every direction."""
    frame, value = bytes.fromhex(vector["hex"]), from_json(vector["value"])
    assert msgpack.unpackb(frame, raw=False) == value
    message = wire.decode(frame, getattr(wire, vector["message"]))
    again = wire.encode(message)
    assert again == frame, (
        f"a change of the protocol: vectors.json would have to say {again.hex()} for {builtins(message)}"
    )
    if "body" in vector:
        body = wire.convert(message.body, getattr(wire, vector["body"]))
        assert builtins(body) == value["body"]


def test_every_message_has_a_vector() -> None:
    expected = {f"{op}: request" for op in wire.OPS}
    expected |= {f"{op}: reply" for op, (_, reply) in wire.OPS.items() if reply is not None}
    expected |= {f"announcement: {row[0].strip('`')}" for row in table("## Announcements")}
    assert expected <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_unknown_keys_are_ignored() -> None:
    """What a newer peer adds does not disturb an older one."""
    frame = msgpack.packb({"v": 1, "id": 5, "op": "beat", "body": {"progress": 3, "mood": "calm"}, "colour": "red"})
    request = wire.decode(frame, wire.Request)
    assert wire.convert(request.body, wire.Beat) == wire.Beat(3)


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of protocol.md, without its two lines of head."""
    section = TEXT.split(f"\n{heading}\n", 1)[1]
    section = re.split(r"\n#+ ", section, maxsplit=1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def fields(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


def test_the_table_of_operations_is_complete() -> None:
    said = {row[0].strip("`"): (fields(row[1]), row[2]) for row in table("## Operations")}
    assert set(said) == set(wire.OPS)
    for op, (body, reply) in wire.OPS.items():
        assert said[op][0] == list(body.__struct_fields__), op
        if reply is None:
            continue
        answered = said[op][1]
        if getattr(wire, (name := answered.strip("`")), None) is not None:
            assert name == reply.__name__, op  # described below, in its own table
        else:
            assert fields(answered) == list(reply.__struct_fields__), op


@pytest.mark.parametrize(
    "struct",
    [
        wire.Request, wire.Reply, wire.Failure, wire.Announcement, wire.EventInfo, wire.FieldSpec, wire.MemoryInfo,
        wire.ChannelSpec, wire.ChannelInfo, wire.ArraySpec, wire.ArrayInfo, wire.Hello, wire.Welcome,
    ],
    ids=lambda struct: struct.__name__,
)  # fmt: skip
def test_the_tables_of_structures_are_complete(struct: type[msgspec.Struct]) -> None:
    said = [fields(row[0])[0] for row in table(f"### {struct.__name__}")]
    assert said == list(struct.__struct_fields__)


def test_the_table_of_errors_is_complete() -> None:
    said = {fields(row[0])[0]: row[1].strip("`") for row in table("## Error codes")}
    assert said == {code: cls.__name__ for code, cls in errors.BY_CODE.items()}


def test_the_limits_are_those_of_the_code() -> None:
    assert f"{wire.MAX_MESSAGE:,} bytes" in TEXT
    assert f"{wire.MAX_DEPTH_ITEMS:,} entries" in TEXT
    assert f"versions {wire.PROTOCOL_MIN} to {wire.PROTOCOL_MAX}" in TEXT
