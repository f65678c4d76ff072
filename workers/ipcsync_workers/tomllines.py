"""On which line of a TOML file each key stands: ``tomllib`` gives values only, and a mistake is named by its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

Path = tuple[str, ...]

_TOKEN = re.compile(
    r"""
    (?P<string> \"{3}(?:[^\\]|\\.)*?\"{3,5} | '{3}.*?'{3,5} | "(?:[^"\\\n]|\\.)*" | '[^'\n]*' )
  | (?P<comment> \#[^\n]* )
  | (?P<newline> \n )
  | (?P<mark> [\[\]{}=,.] )
  | (?P<word> [^\s\[\]{}=,."'\#]+ )
    """,
    re.VERBOSE | re.DOTALL,
)


def key_lines(text: str) -> dict[Path, int]:
    """{path of a key or table: the line it is first named on, from 1}. `text` is TOML that ``tomllib`` has accepted."""
    lines: dict[Path, int] = {}
    for path, line in _named(text):
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def _named(text: str) -> Iterator[tuple[Path, int]]:
    table: Path = ()  # what the last [header] named
    prefix: Path = ()  # where keys are being named now: the table, or an inline table in it
    path: Path = ()
    key: list[str] = []
    open_brackets: list[tuple[str, Path, Path]] = []
    line, in_key, in_header = 1, True, False
    for token in _TOKEN.finditer(text):
        kind, what = token.lastgroup, token.group()
        if kind == "newline":
            line += 1
            if not open_brackets:
                key, in_key, in_header, prefix = [], True, False, table
        elif kind == "comment":
            pass
        elif in_key and not in_header and what == "[" and not open_brackets and not key:
            in_header = True
        elif in_header:
            if kind in ("word", "string"):
                key.append(_plain(what))
            elif what == "]" and key:
                table, key = tuple(key), []
                yield table, line
        elif in_key and kind in ("word", "string"):
            key.append(_plain(what))
        elif in_key and what == "=":
            path, key, in_key = (*prefix, *key), [], False
            yield path, line
        elif what in ("{", "["):
            open_brackets.append((what, prefix, path))
            prefix, in_key = path, what == "{"
        elif what in ("}", "]") and open_brackets:
            _, prefix, path = open_brackets.pop()
            key, in_key = [], False
        elif what == "," and open_brackets and open_brackets[-1][0] == "{":
            key, in_key = [], True
        if kind == "string":
            line += what.count("\n")


def _plain(word: str) -> str:
    """A key without its quotes and escapes."""
    return next(iter(tomllib.loads(f"{word} = 0"))) if word[0] in "\"'" else word
