"""``ipcsync mps``: a private MPS daemon in the runtime directory."""

from __future__ import annotations

import shlex

import click

from . import runtime
from .errors import InvalidState
from .mps import COST, Daemon


@click.group()
def mps() -> None:
    """Share a GPU between processes at once: a private MPS daemon in the runtime directory.

    Without it, kernels of two processes take turns. `ipcsync run --mps` starts and stops one by itself.
    """


@mps.command()
def start() -> None:
    """Start it, to stay until `ipcsync mps stop`."""
    daemon = Daemon(runtime.directory(create=True))
    with daemon.used(keep=True) as environment:
        click.echo(f"MPS control daemon (pid {daemon.pid()}) serves {daemon.folder}")
    click.echo(f"note: {COST}", err=True)
    click.echo("processes that start with these are its clients, the broker must be one of them:")
    for name, value in environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@mps.command()
def stop() -> None:
    """Stop it. Refused while a run uses it."""
    daemon = Daemon(runtime.directory(create=False))
    if not daemon.unused():
        raise InvalidState("a run uses this MPS daemon, and would lose the GPU: end it first")
    pid = daemon.pid()
    daemon.stop()
    click.echo("no MPS daemon ran" if pid is None else f"stopped MPS control daemon (pid {pid})")


@mps.command()
def status() -> None:
    """Say whether it runs, and for whom. Exit status 1 if it does not."""
    daemon = Daemon(runtime.directory(create=False))
    pid = daemon.pid()
    if pid is None:
        click.echo(f"no MPS daemon runs in {daemon.runtime}; start one with `ipcsync mps start`")
        raise SystemExit(1)
    clients = daemon.clients()
    click.echo(f"MPS control daemon (pid {pid}) serves {daemon.folder}")
    click.echo(f"servers: {' '.join(map(str, daemon.servers())) or 'none yet'}")
    click.echo(f"clients: {' '.join(map(str, clients)) or 'none'}")
    click.echo(f"in use by a run: {'no' if daemon.unused() else 'yes'}")
