"""One probe of ``ipcsync doctor`` in a process of its own, which prints its finding: ``-m ipcsync.doctor_probe NAME``.

A probe that crashes, hangs or takes its CUDA context with it harms nobody, and is a finding itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import import_module

OK, WARNING, FAILS = "ok", "warning", "fails"
_MODULES = {"litmus": "doctor_litmus", "cuda": "doctor_gpu"}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do where it is not as it should be."""

    name: str
    status: str
    text: str
    advice: str = ""


def probe(name: str, which: str, *arguments: str, timeout: float = 60.0) -> Finding:
    """The finding of a probe ``MODULE.FUNCTION``, run in a fresh process; `name` is its line's."""
    command = [sys.executable, "-m", "ipcsync.doctor_probe", which, *arguments]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, FAILS, f"did not end within {timeout:g} s", "run it alone: " + " ".join(command[1:]))
    try:
        found = json.loads(ended.stdout.splitlines()[-1])
        return Finding(name, found["status"], found["text"], found["advice"])
    except (IndexError, ValueError, KeyError, TypeError):
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
        return Finding(name, FAILS, f"the probe broke off: {last}", "run it alone: " + " ".join(command[1:]))


def start(which: str, *arguments: str) -> subprocess.Popen[str]:
    """The other process of a probe of two; what it prints is read from its ``stdout``."""
    command = [sys.executable, "-m", "ipcsync.doctor_probe", which, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def main(arguments: list[str]) -> None:
    module, _, function = arguments[0].partition(".")
    found = getattr(import_module(f".{_MODULES[module]}", __package__), function)(*arguments[1:])
    if found is not None:
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
