"""What the stages that read and write files share."""

from __future__ import annotations

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


def target(stage: Stage, slot: Any, suffix: str) -> Path:
    """Where an item goes: ``params.folder``, under the name in its meta or else its number."""
    folder = Path(stage.params.get("folder", "out")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    name = str(slot.meta.get("name") or f"{slot.number:06d}").replace("/", "_")
    return folder / f"{name}{suffix}"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file that appears under its name whole, or not at all."""
    partial = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
