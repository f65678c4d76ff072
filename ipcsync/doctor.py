"""``ipcsync doctor``: whether this machine and this container can do it, before anything runs.

Every line is ok, a warning (it works, with a limit that is said) or fails (with what to do). What can be tried is
tried, in fresh processes and with a deadline, rather than read from an attribute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import doctor_cuda, doctor_host
from .doctor_probe import FAILS, WARNING, Finding

_STYLE = {"ok": "green", WARNING: "yellow", FAILS: "bold red"}


def findings() -> Iterator[Finding]:
    """Looks at the host, then at the GPUs; each finding as it is made."""
    return chain(doctor_host.findings(), doctor_cuda.findings())


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Look whether this machine can do it: shared memory, processes, CUDA and its IPC.

    Exit status: 1 when something fails, 0 otherwise. A machine without a GPU is only warned about: device="cpu" works.
    """
    found = list(findings())
    worst = {finding.status for finding in found}
    if as_json:
        summary = FAILS if FAILS in worst else WARNING if WARNING in worst else "ok"
        lines = [{name: getattr(f, name) for name in ("name", "status", "text", "advice")} for f in found]
        click.echo(json.dumps({"status": summary, "findings": lines}, indent=2))
    else:
        _show(found)
    sys.exit(1 if FAILS in worst else 0)


def _show(found: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        text = finding.text + (f"\n→ {finding.advice}" if finding.advice else "")
        table.add_row(Text(finding.status, _STYLE[finding.status]), finding.name, Text(text))  # no markup: "[cuda13]"
    Console(highlight=False).print(table)
    counts = {status: sum(f.status == status for f in found) for status in _STYLE}
    click.echo(f"\n{counts['ok']} ok, {counts[WARNING]} warnings, {counts[FAILS]} fail")


if __name__ == "__main__":
    doctor(prog_name="ipcsync doctor")
