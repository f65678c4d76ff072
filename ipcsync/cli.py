"""The ``ipcsync`` command. Each package brings its own subcommands (entry points, group ``ipcsync.commands``)."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points

import click

from . import __version__
from .errors import IpcSyncError

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


class _Commands(click.Group):
    """Subcommands are imported only when they are called (or listed), so that the command starts at once."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would say "Aborted!" and leave with 1, as if it had failed
            sys.exit(INTERRUPTED)

    def _entries(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group="ipcsync.commands")}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._entries()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries().get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        command = entry.load()
        if not isinstance(command, click.Command):
            raise click.ClickException(f"the entry point {entry.value} is no click command")
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ipcsync")
def ipcsync() -> None:
    """Several processes take turns on GPU data, and no process's death hangs another."""


def main() -> None:
    """The console script. An error of ours is its sentence, no traceback, and exit status 1."""
    try:
        ipcsync(prog_name="ipcsync")
    except IpcSyncError as error:
        click.echo(f"ipcsync: {error}", err=True)
        sys.exit(1)
