"""The code in README and docs, as programs: what test_docs.py runs.

Every fenced ``python`` block is a program of its own. A comment right above a fence says otherwise:

====================  ==================================================================================================
``<!-- continues -->``  goes on in the process of the python block before
``<!-- file: NAME -->`` is written to NAME in the page's folder (any language), and not run by itself
``<!-- run -->``        a ``sh`` block that is run, too, in the page's folder
``<!-- output -->``     a ``text`` block: its lines must appear, in order, in what the program before printed
``<!-- cuda -->``       runs only where there is a GPU (``-m cuda``)
``<!-- needs: X Y -->`` runs only where these modules can be imported
``<!-- not run: WHY -->`` commands that cannot be run here
====================  ==================================================================================================

Above its first heading a page may say ``<!-- broker -->`` (a broker must be running) and ``<!-- on: host cuda -->``
(all of it runs on both; else on the host only, and its ``cuda`` blocks on a GPU).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- ([^>]*?) -->\n$")


@dataclass
class Block:
    language: str
    code: str
    line: int
    says: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        return [module for module in self.says.get("needs", "").split() if find_spec(module) is None]


@dataclass
class Step:
    """One program, or a file to write (``file``). ``output``: lines that must appear."""

    line: int
    language: str
    code: str
    file: str = ""
    output: list[str] = field(default_factory=list)


class Page:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        text = path.read_text()
        self.says = _says(text.split("\n#", 1)[0] if not text.startswith("#") else "")
        self.blocks = [
            Block(
                match[1],
                match[2],
                text.count("\n", 0, match.start()) + 2,
                _says(above[0] if (above := _COMMENT.search(text[: match.start()])) else ""),
            )
            for match in _FENCE.finditer(text)
        ]

    def devices(self) -> list[str]:
        """What the page's programs run on, "host" and "cuda"; empty when it has none."""
        runnable = [b for b in self.blocks if b.language == "python" or "run" in b.says]
        found = set(self.says.get("on", "host").split()) if any("cuda" not in b.says for b in runnable) else set()
        return sorted(found | {"cuda" for b in runnable if "cuda" in b.says}, reverse=True)

    def steps(self, device: str) -> list[Step]:
        """What is done, in order. Blocks for a GPU are left out on the host, and on a GPU the others are, unless the
        page is for both."""
        both = "cuda" in self.says.get("on", "")
        steps: list[Step] = []
        last: Step | None = None
        for block in self.blocks:
            wanted = both or ("cuda" in block.says) == (device == "cuda") or "file" in block.says
            if "output" in block.says:
                if last is not None:
                    last.output += [line for line in block.code.splitlines() if line.strip()]
                continue
            if not (block.language == "python" or {"file", "run"} & set(block.says)):
                continue
            last = None
            if block.missing or not wanted or (device == "host" and "cuda" in block.says):
                continue
            if "continues" in block.says:
                previous = next(step for step in reversed(steps) if step.language == "python" and not step.file)
                pad = "\n" * (block.line - previous.line - previous.code.count("\n"))
                previous.code += pad + block.code
                last = previous
                continue
            last = Step(block.line, block.language, block.code, block.says.get("file", ""))
            steps.append(last)
        return steps


def _says(text: str) -> dict[str, str]:
    said = {}
    for comment in re.findall(r"<!-- ([^>]*?) -->", text):
        for part in comment.split(";"):
            key, _, value = part.partition(":")
            said[key.strip()] = value.strip()
    return said


def pages() -> list[Page]:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(path) for path in paths if not {"_build", "examples"} & set(path.relative_to(ROOT).parts)]
