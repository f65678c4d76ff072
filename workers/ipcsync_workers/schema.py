"""What may stand in pipeline.toml: one struct a table, one field a key. docs/reference has the same as prose."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,120}$")]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")]
Shape = Annotated[tuple[Annotated[int, Meta(ge=1, lt=1 << 48)], ...], Meta(max_length=8)]
Restart = Literal["never", "on-failure"]
Policy = Literal["block", "latest"]


class Settings(Struct, kw_only=True):
    """``[pipeline]``."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,60}$")] = "pipeline"
    device: Device = "auto"  # of every channel and stage that names none: cuda if there is one, else cpu


class FieldPlan(Struct, kw_only=True):
    """``fields.NAME`` of a channel."""

    shape: Shape
    dtype: str


class ChannelPlan(Struct, kw_only=True):
    """``[channels.NAME]``: either ``shape`` and ``dtype``, or ``fields``."""

    shape: Shape | None = None
    dtype: str | None = None
    fields: dict[str, FieldPlan] = {}
    depth: Annotated[int, Meta(ge=2, le=4096)] = 4
    device: Device | None = None
    meta_bytes: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096


class StagePlan(Struct, kw_only=True):
    """``[stages.NAME]``."""

    call: str = ""  # there must be one: module:function
    inputs: tuple[Name, ...] = ()
    outputs: tuple[Name, ...] = ()
    params: dict[str, Any] = {}
    device: Device | tuple[Device, ...] | None = None  # several: one for each replica
    policy: Policy = "block"  # of its inputs; "latest" passes over what it was too slow for
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    restart: Restart = "never"
    restart_limit: Annotated[int, Meta(ge=0, le=50)] = 3  # a channel remembers its last 64 writers
    restart_delay: Annotated[float, Meta(ge=0, le=3600)] = 0.5  # seconds; doubled at every further restart


#: What a value that does not fit should have been, in words.
WANTED = {
    "name": "1 to 60 letters, digits, '_', '.' or '-'",
    "device": "'auto', 'cpu', 'cuda' or 'cuda:N' (of a stage with replicas: or a list with one for each)",
    "shape": "a list of at most 8 whole numbers, each at least 1",
    "dtype": "the name of a data type, such as 'uint8'",
    "depth": "a whole number from 2 to 4096",
    "meta_bytes": "a whole number of bytes up to 1048576",
    "call": "'module:function'",
    "inputs": "a list of channel names",
    "outputs": "a list of channel names",
    "params": "a table",
    "policy": "'block' or 'latest'",
    "replicas": "a whole number from 1 to 64",
    "restart": "'never' or 'on-failure'",
    "restart_limit": "a whole number from 0 to 50",
    "restart_delay": "seconds, from 0 to 3600",
}
