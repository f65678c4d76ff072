"""What is configured, and where it comes from: a TOML file, then ``IPCSYNC_*`` in the environment, then options.

The later wins. The files are ``/etc/xdg/ipcsync/config.toml`` (of the site) and ``~/.config/ipcsync/config.toml`` (of
the user, over the site's), or only the one that ``IPCSYNC_CONFIG`` names. A key that is not known is an error that says
which one is nearest. ``ipcsync config`` prints what is in force.

The key ``broker.http`` is ``http`` in the file's table ``[broker]``, ``IPCSYNC_BROKER_HTTP`` in the environment, and
``--http`` of ``ipcsync broker``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from .errors import InvalidArgument

FILE = "IPCSYNC_CONFIG"


@dataclass(frozen=True)
class Setting:
    """One thing that can be set. ``type`` is what msgspec checks it against."""

    key: str
    type: Any
    default: Any
    help: str

    @property
    def variable(self) -> str:
        return "IPCSYNC_" + self.key.replace(".", "_").upper()


@dataclass(frozen=True)
class Value:
    """A value in force, and where it comes from: ``default``, a file's path, or ``$VARIABLE``."""

    value: Any
    source: str


def _settings() -> Iterator[Setting]:
    from msgspec import Meta

    positive = Annotated[int, Meta(ge=1)] | None
    uid = Annotated[int, Meta(ge=0, lt=2**32 - 1)]
    yield Setting("runtime_dir", str, f"/dev/shm/ipcsync-{os.getuid()}", "where broker and sessions meet, on a tmpfs")
    yield Setting("runtime_owner", uid | None, None, "whose runtime_dir it is, if not ours: a uid that we trust")
    yield Setting("namespace", Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,120}$")], "default", "of names")
    yield Setting("keys", str | None, None, "folder of CURVE keys; `keys` beside the user's file without")
    yield Setting("broker.linger", bool, False, "leave with the last session")
    yield Setting("broker.http", str | None, None, "HOST:PORT of page, metrics and health check; off without")
    yield Setting("broker.tcp", str | None, None, "tcp://HOST:PORT where it serves too, by keys; off without")
    yield Setting("broker.allow_uid", list[uid], [], "other uids that it lets in, and trusts as its own")
    yield Setting("broker.log_format", Literal["text", "json"], "text", "of the broker's log")
    yield Setting("broker.log_level", Literal["debug", "info", "warning", "error"], "info", "of the broker's log")
    yield Setting("broker.max_sessions", positive, None, "sessions at a time")
    yield Setting("broker.max_events", positive, None, "events, channels and arrays in all")
    yield Setting("broker.max_channels", positive, None, "channels and arrays in all")
    yield Setting("broker.max_bytes", positive, None, "bytes of memory that the broker owns, in all")
    yield Setting("broker.max_session_events", positive, None, "events, channels and arrays of one session")
    yield Setting("broker.max_session_channels", positive, None, "channels and arrays of one session")
    yield Setting("broker.max_session_bytes", positive, None, "bytes that the broker owns for one session")


def settings() -> dict[str, Setting]:
    """Every setting by its key."""
    return {setting.key: setting for setting in _settings()}


def files(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The files that are read, the weakest first."""
    if environ.get(FILE):
        return [Path(environ[FILE])]
    import platformdirs

    site = Path(platformdirs.site_config_dir("ipcsync").split(os.pathsep)[0])
    return [folder / "config.toml" for folder in (site, Path(platformdirs.user_config_dir("ipcsync")))]


def load(environ: Mapping[str, str] = os.environ) -> dict[str, Value]:
    """Every setting as it is in force by files and environment."""
    return resolve([(str(path), content) for path, content in _read(files(environ), environ)], environ)


def value(key: str, environ: Mapping[str, str] = os.environ) -> Any:
    """One value in force."""
    setting = settings()[key]
    text = environ.get(setting.variable)  # the strongest: no file is looked at
    return _checked(setting, text, setting.variable, strict=False) if text else load(environ)[key].value


def _read(paths: list[Path], environ: Mapping[str, str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    import tomllib

    for path in paths:
        try:
            text = path.read_text()
        except FileNotFoundError:
            if environ.get(FILE):
                raise InvalidArgument(f"{FILE} names {path}, which does not exist") from None
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path} cannot be read: {error}") from None
        try:
            yield path, tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgument(f"{path} is no TOML: {error}") from None


def resolve(contents: list[tuple[str, dict[str, Any]]], environ: Mapping[str, str]) -> dict[str, Value]:
    """Pure: the contents of files (the weakest first) and an environment, checked and laid over the defaults."""
    known = settings()
    found = {key: Value(setting.default, "default") for key, setting in known.items()}
    for source, content in contents:
        for key, given in _flat(content):
            if key not in known:
                raise InvalidArgument(f"{source}: there is no setting {key!r}{_nearest(key, known)}")
            found[key] = Value(_checked(known[key], given, f"{source}: {key}", strict=True), source)
    variables = {setting.variable: setting for setting in known.values()}
    for variable, text in sorted(environ.items()):
        if variable in variables:
            setting = variables[variable]
            if text:
                found[setting.key] = Value(_checked(setting, text, variable, strict=False), f"${variable}")
        elif variable.startswith("IPCSYNC_") and (near := get_close_matches(variable, variables, 1, 0.9)):
            raise InvalidArgument(f"there is no variable {variable}; did you mean {near[0]}?")
    return found


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, given in content.items():
        if isinstance(given, dict):
            yield from _flat(given, f"{prefix}{key}.")
        else:
            yield prefix + key, given


def _nearest(key: str, known: Mapping[str, Setting]) -> str:
    near = get_close_matches(key, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


def _checked(setting: Setting, given: Any, where: str, *, strict: bool) -> Any:
    import msgspec

    if not strict and get_origin(setting.type) is list:
        given = given.replace(",", " ").split()
    try:
        return msgspec.convert(given, setting.type, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{where} = {given!r}: {error} ({setting.help})") from None
