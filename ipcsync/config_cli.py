"""``ipcsync config``: what is in force, and where each value comes from."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from . import config as configuration


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def config(as_json: bool) -> None:
    """Prints every setting: its value in force, and where that comes from.

    Sources, the later over the earlier: the site's file, yours, IPCSYNC_* in the environment, options of a command.
    """
    found = configuration.load()
    if as_json:
        click.echo(json.dumps({key: {"value": v.value, "source": v.source} for key, v in found.items()}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("setting", "value", "from", "what it is"):
        table.add_column(title, overflow="fold")
    known = configuration.settings()
    for key, each in found.items():
        shown = "-" if each.value is None else str(each.value)
        table.add_row(key, shown, each.source, known[key].help)
    console = Console()
    console.print(table)
    read = [f"{path}{'' if path.exists() else ' (not there)'}" for path in configuration.files()]
    console.print(f"\nfiles: {', '.join(read)}", soft_wrap=True)
