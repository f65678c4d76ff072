"""What the stages that read and write files share."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipcsync.errors import InvalidArgument

from ..stage import Stage


def listed(stage: Stage, suffixes: Iterable[str]) -> list[Path]:
    """The files of ``params.folder`` with these suffixes, by name."""
    folder = Path(stage.params.get("folder", ".")).expanduser()
    if not folder.is_dir():
        raise InvalidArgument(
            f"{folder.absolute()} is no folder: name one with --set stages.{stage.name}.params.folder=DIR"
        )
    wanted = {suffix.lower() for suffix in suffixes}
    files = (path for path in folder.iterdir() if path.suffix.lower() in wanted and not path.name.startswith("."))
    found = sorted(path for path in files if path.is_file())
    stage.expect(len(found))
    return found


LONGEST = 255  # bytes of a file's name


def shown(name: str) -> str:
    """A file's name as text that can be printed and put into a meta: names are bytes, and need not be UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def target(stage: Stage, slot: Any, suffix: str) -> Path:
    """Where an item goes: ``params.folder``, under the name in its meta or else its number."""
    folder = Path(stage.params.get("folder", "out")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    name = str(slot.meta.get("name") or f"{slot.number:06d}").replace("/", "_")
    if len(name.encode()) + len(suffix) > LONGEST:  # two that begin alike stay two
        name = f"{name.encode()[:200].decode(errors='ignore')}-{zlib.crc32(name.encode()):08x}"
    return folder / f"{name}{suffix}"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file that appears under its name whole, or not at all."""
    # Its name may be as long as a name can be.
    partial = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.part{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
