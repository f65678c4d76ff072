"""The line of every key of a TOML file."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from ipcsync_workers.tomllines import key_lines

TRICKY = '''# a comment with [brackets] = and "quotes"
top = 1
[plain]
key = "text with # no comment and = [x]"
"quoted key" = 2
'single.dotted' = 3
dotted.inner.deep = 4
[plain.sub]  # comment
list = [
    1,  # one ]
    "a]",
    { inside = 1 },
]
after = true
long = """
[not.a.table]
fake = 1 \\""" still
""""
literal = \'\'\'
x = 1\'\'\'
behind = 1979-05-27T07:32:00Z
[[many]]
a = 1
[[many]]
b = { c = { d = [1, { e = 2 }] }, f = "}" }
[ spaced . "out" ]
  indented = -1.5e3
'''


def paths(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, list):
        return [path for each in value for path in paths(each, prefix)]
    if not isinstance(value, dict):
        return []
    return [path for key, each in value.items() for path in [(*prefix, key), *paths(each, (*prefix, key))]]


def test_every_key_has_a_line_and_nothing_else_has():
    assert set(key_lines(TRICKY)) == set(paths(tomllib.loads(TRICKY)))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("top", 2),
        ("plain", 3),
        ("plain/quoted key", 5),
        ("plain/single.dotted", 6),
        ("plain/dotted/inner", 7),
        ("plain/sub", 8),
        ("plain/sub/list", 9),
        ("plain/sub/list/inside", 12),
        ("plain/sub/after", 14),
        ("plain/sub/long", 15),
        ("plain/sub/literal", 19),
        ("plain/sub/behind", 21),
        ("many", 22),
        ("many/b/c/d/e", 25),
        ("spaced/out/indented", 27),
    ],
)
def test_the_line_is_where_the_key_stands(path, line):
    assert key_lines(TRICKY)[tuple(path.split("/"))] == line


def test_windows_line_ends_count_once():
    assert key_lines("a = 1\r\nb = 2\r\n") == {("a",): 1, ("b",): 2}
