"""What tests of ``ipcsync run`` share: pieces of a pipeline file, and a run under way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ..harness import Hang, wait_until

#: Seconds for a step of a run: it starts many interpreters, and they may share two cores with other tests.
PATIENCE = 120.0
COMMAND = [sys.executable, "-c", "from ipcsync.cli import main; main()", "run"]
HEAD = """
[pipeline]
name = "test"
device = "cpu"
"""


def channel(name: str, shape: str = "[4]") -> str:
    return f'[channels.{name}]\nshape = {shape}\ndtype = "int64"\n'


def stage(name: str, call: str, *, inputs: str = "", outputs: str = "", more: str = "") -> str:
    def listed(names: str) -> str:
        return json.dumps(names.split())

    call = call if ":" in call else f"stages:{call}"
    return f'[stages.{name}]\ncall = "{call}"\ninputs = {listed(inputs)}\noutputs = {listed(outputs)}\n{more}\n'


class Run:
    """``ipcsync run`` under way. Its output goes to files, so that no pipe is ever full."""

    def __init__(self, folder: Path, file: Path, *arguments: str) -> None:
        self._out, self._err = folder / "run.out", folder / "run.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen([*COMMAND, str(file), *arguments], stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def saw(self, pattern: str) -> re.Match[str]:
        """Waits until the run said something that matches."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.err)
            if found is None and self.process.poll() is not None:
                raise AssertionError(f"the run ended with {self.process.returncode} before {pattern!r}\n{self.err}")
            return found

        found = wait_until(look, f"{pattern!r} in the output", PATIENCE)
        assert isinstance(found, re.Match)
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout: float = PATIENCE) -> int:
        """Its exit status; what it said is shown if it hangs."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Hang(f"ipcsync run did not end\n{self.out}\n{self.err}") from None


def starts(folder: Path, stages: str) -> Iterator[Callable[..., Run]]:
    """The body of a fixture: ``start(text of the file, *arguments)``, whose `stages` are beside it."""
    runs: list[Run] = []

    def start(text: str, *arguments: str) -> Run:
        (folder / "stages.py").write_text(stages)
        (folder / "pipeline.toml").write_text(HEAD + text)
        runs.append(Run(folder, folder / "pipeline.toml", "--json", str(folder / "report.json"), *arguments))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def report(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "report.json").read_text())
