"""pipeline.toml: read and checked before anything starts. All mistakes are found in one go, each with key and line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Struct

from ipcsync.errors import IpcSyncError, PipelineInvalid

from . import graph
from .calls import CallInfo, did_you_mean, inspect_calls
from .schema import WANTED, ChannelPlan, FieldPlan, Settings, StagePlan
from .tomllines import key_lines

S = TypeVar("S", bound=Struct)
Key = tuple[str, ...]
_TABLES = ("pipeline", "channels", "stages")


class Problems:
    """The mistakes found so far; the line of one is that of its key, or of the nearest table around it."""

    def __init__(self, lines: dict[Key, int], overridden: Iterable[Key] = ()) -> None:
        self._lines = lines
        self._overridden = set(overridden)
        self.found: list[tuple[int, str, str]] = []

    def add(self, key: Key, message: str) -> None:
        """`message` about `key`. Line 0 stands for the command line: a value given with ``--set`` has none."""
        line = 0 if key in self._overridden else next((self._lines[k] for k in _outwards(key) if k in self._lines), 1)
        problem = (line, ".".join(key), message)
        if problem not in self.found:
            self.found.append(problem)

    def raise_any(self, path: Path) -> None:
        if self.found:
            raise invalid(path, sorted(self.found))


def _outwards(key: Key) -> list[Key]:
    return [key[:length] for length in range(len(key), 0, -1)]


def invalid(path: Path, problems: list[tuple[int, str, str]]) -> PipelineInvalid:
    """The error that names them all, one a line."""
    said = [f"{path.name}:{line}: {key}: {what}" if line else f"--set {key}: {what}" for line, key, what in problems]
    count = "1 mistake" if len(said) == 1 else f"{len(said)} mistakes"
    return PipelineInvalid(f"{path}: {count}, nothing was started\n  " + "\n  ".join(said), problems=problems)


class Pipeline(Struct):
    """A checked pipeline: its tables, the folder that its paths and modules are relative to, and its lines."""

    path: Path
    settings: Settings
    channels: dict[str, ChannelPlan]
    stages: dict[str, StagePlan]
    calls: dict[str, CallInfo]
    lines: dict[Key, int]

    @property
    def folder(self) -> Path:
        return self.path.parent

    def device(self, plan: ChannelPlan | StagePlan, replica: int = 0) -> str | None:
        """The device that a channel or a stage's replica is on, as ``ipcsync.Device`` takes it; None: cuda if there is
        one."""
        named = plan.device or self.settings.device
        device = named if isinstance(named, str) else named[replica]
        return None if device == "auto" else device


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    inspect: Callable[[Iterable[str], Path], dict[str, CallInfo]] = inspect_calls,
) -> Pipeline:
    """Reads and checks a pipeline file.

    `overrides` are ``a.b.c=value``: the value is TOML, or text where it is none (or where the file has text). Raises
    ``PipelineInvalid`` whose ``problems`` are ``(line, key, message)``; nothing has been started by then.
    """
    path = Path(path).resolve()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise invalid(path, [(1, "file", "there is no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(path, [(1, "file", f"it cannot be read: {error}")]) from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        raise invalid(path, [(int(at.group(1)) if at else text.count("\n") + 1, "syntax", str(error))]) from None
    lines = key_lines(text)
    overridden = [_override(document, each, path) for each in overrides]
    problems = Problems(lines, overridden)
    for name in document.keys() - set(_TABLES):
        problems.add((name,), f"unknown table{did_you_mean(name, _TABLES)} (there are {', '.join(_TABLES)})")
    settings = _struct(Settings, document.get("pipeline", {}), ("pipeline",), problems) or Settings()
    channels = _tables(ChannelPlan, document, "channels", problems)
    stages = _tables(StagePlan, document, "stages", problems)
    if not document.get("stages"):
        problems.add(("stages",), "a pipeline has at least one stage: [stages.NAME] with a call")
    for name, channel in channels.items():
        _check_channel(name, channel, document["channels"][name], problems)
    for name, stage in stages.items():
        if not stage.call:
            problems.add(("stages", name, "call"), "is missing: call = 'module:function'")
    calls = inspect({stage.call for stage in stages.values() if stage.call}, path.parent)
    graph.check(stages, set(channels), calls, problems.add)
    _check_devices(settings, channels, stages, problems)
    problems.raise_any(path)
    return Pipeline(path, settings, channels, stages, calls, lines)


# -- overrides


def _override(document: dict[str, Any], text: str, path: Path) -> Key:
    """Sets one ``a.b.c=value`` in the document and returns its key."""
    name, equals, value = text.partition("=")
    try:
        key = _only_path(tomllib.loads(f"{name} = 0"))
    except tomllib.TOMLDecodeError:
        key = ()
    if not equals or not key:
        raise invalid(path, [(0, text, "an override is key=value, as in stages.read.params.folder=photos")])
    table: Any = document
    for depth, part in enumerate(key[:-1]):
        # Channels and stages are the file's: an override with a misspelt name must not quietly make a new one.
        if not isinstance(table, dict) or (depth == 1 and part not in table):
            hint = did_you_mean(part, table) if isinstance(table, dict) else ""
            raise invalid(path, [(0, ".".join(key), f"the file has no {'.'.join(key[: depth + 1])!r}{hint}")])
        table = table.setdefault(part, {})
    if not isinstance(table, dict):
        raise invalid(path, [(0, ".".join(key), f"{'.'.join(key[:-1])!r} is no table")])
    table[key[-1]] = _value(value, text_wanted=isinstance(table.get(key[-1]), str), folder=path.parent)
    return key


def _only_path(document: dict[str, Any]) -> Key:
    key: list[str] = []
    inner: Any = document
    while isinstance(inner, dict):
        ((part, inner),) = inner.items()
        key.append(part)
    return tuple(key)


def _value(text: str, *, text_wanted: bool, folder: Path) -> Any:
    """What the command line means by `text`. A path is the shell's where it says so, or exists only from there."""
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        value = text
    if text_wanted and not isinstance(value, str):
        value = text
    if value == text:
        here = Path(text).expanduser()
        from_shell = text.startswith(("./", "../", "~"))
        if not here.is_absolute() and (from_shell or (here.exists() and not (folder / here).exists())):
            return str(here.absolute())
        if from_shell:
            return str(here)
    return value


# -- tables against their schema


def _tables(kind: type[S], document: dict[str, Any], name: str, problems: Problems) -> dict[str, S]:
    tables = document.get(name, {})
    if not isinstance(tables, dict):
        problems.add((name,), f"must be tables, [{name}.NAME]")
        return {}
    found = {}
    for each, table in tables.items():
        if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,120}", each):
            problems.add((name, each), "a name is 1 to 120 letters, digits, '_', '.', '-'")
            continue
        made = _struct(kind, table, (name, each), problems)
        if made is not None:
            found[each] = made
    return found


def _struct(kind: type[S], table: Any, key: Key, problems: Problems) -> S | None:
    """The table as `kind`, without the values that do not fit: those are named. None when it cannot be one at all."""
    if not isinstance(table, dict):
        problems.add(key, f"must be a table, not {_kind(table)}")
        return None
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in table.keys() - fields.keys():
        problems.add((*key, name), f"unknown key{did_you_mean(name, fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in table:
            if field.required:
                problems.add((*key, name), "is missing")
                return None
            continue
        if name == "fields":
            values[name] = _fields(table[name], (*key, name), problems)
            continue
        try:
            values[name] = msgspec.convert(table[name], hints[name])
        except msgspec.ValidationError as error:
            problems.add((*key, name), _friendly(name, table[name], str(error)))
            if field.required:
                return None
            if name in ("inputs", "outputs") and isinstance(table[name], str):
                values[name] = (table[name],)  # what was meant is clear: the graph is checked with it
    return kind(**values)


def _fields(table: Any, key: Key, problems: Problems) -> dict[str, FieldPlan]:
    if not isinstance(table, dict):
        problems.add(key, "must be a table: fields.NAME = { shape = [...], dtype = '...' }")
        return {}
    made = {name: _struct(FieldPlan, each, (*key, name), problems) for name, each in table.items()}
    return {name: plan for name, plan in made.items() if plan is not None}


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


def _friendly(name: str, value: Any, error: str) -> str:
    shown = json.dumps(value, default=str)
    if name in ("inputs", "outputs") and isinstance(value, str):
        return f"must be a list: {name} = [{shown}]"
    return f"must be {WANTED[name]}, not {shown}" if name in WANTED else f"{shown}: {error.partition(' - at ')[0]}"


def _check_channel(name: str, channel: ChannelPlan, table: dict[str, Any], problems: Problems) -> None:
    key = ("channels", name)
    if "fields" in table and ("shape" in table or "dtype" in table):
        problems.add((*key, "fields"), "a channel has either shape and dtype, or fields, not both")
    elif not table.get("fields"):
        for needed in ("shape", "dtype"):
            if needed not in table:
                problems.add((*key, needed), "is missing (or give fields)")
    _check_dtype(channel.dtype, (*key, "dtype"), problems)
    for field, plan in channel.fields.items():
        if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,120}", field):
            problems.add((*key, "fields", field), "a name is 1 to 120 letters, digits, '_', '.', '-'")
        _check_dtype(plan.dtype, (*key, "fields", field, "dtype"), problems)


def _check_dtype(dtype: str | None, key: Key, problems: Problems) -> None:
    from ipcsync import dtypes

    if dtype is not None:
        try:
            dtypes.dtype_name(dtype)
        except IpcSyncError:
            hint = did_you_mean(dtype, dtypes.NAMES) or "; there are uint8, int32, float32, bfloat16 and their like"
            problems.add(key, f"{dtype!r} is no data type that can be shared{hint}")


def _check_devices(
    settings: Settings, channels: dict[str, ChannelPlan], stages: dict[str, StagePlan], problems: Problems
) -> None:
    named: dict[Key, str] = {("pipeline", "device"): settings.device}
    named |= {("channels", name, "device"): c.device for name, c in channels.items() if c.device}
    pairs = list(named.items())
    for name, stage in stages.items():
        devices = (stage.device,) if isinstance(stage.device, str) else stage.device or ()
        pairs += [(("stages", name, "device"), device) for device in dict.fromkeys(devices)]
    if all(device in ("auto", "cpu") for _, device in pairs):
        return
    from ipcsync.backends import select

    for key, device in pairs:
        if device.startswith("cuda"):
            try:
                count = select.backend("cuda").device_count()
            except IpcSyncError as error:
                problems.add(key, str(error))
                continue
            _, _, index = device.partition(":")
            if index and int(index) >= count:
                problems.add(key, f"{device!r}: this machine has {count} CUDA device{'s' * (count != 1)}, from cuda:0")
