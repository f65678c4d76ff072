"""``ipcsync broker``: starts a broker here or in the background, or stops the one that runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ipcsync import config, runtime
from ipcsync.errors import (
    BrokerRunning,
    BrokerUnavailable,
    InvalidArgument,
    IpcSyncError,
    PermissionDenied,
    RuntimeDirectory,
)

EXIT = {BrokerRunning: 3, BrokerUnavailable: 3, RuntimeDirectory: 2, PermissionDenied: 2}


_QUOTAS = {
    "sessions": "Sessions at a time.",
    "events": "Events, channels and arrays in all.",
    "channels": "Channels and arrays in all.",
    "bytes": "Bytes of memory that the broker owns, in all.",
    "session-events": "Events, channels and arrays of one session.",
    "session-channels": "Channels and arrays of one session.",
    "session-bytes": "Bytes that the broker owns for one session.",
}


class _Configured(click.Command):
    """What no option says comes from ``IPCSYNC_BROKER_*`` and the file's table ``[broker]``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            loaded = config.load()
        except InvalidArgument as error:
            raise click.UsageError(str(error), ctx) from None
        found = {k.removeprefix("broker."): v.value for k, v in loaded.items() if k.startswith("broker.")}
        ctx.default_map = {name: value for name, value in found.items() if value is not None}
        return super().parse_args(ctx, args)


@click.command(cls=_Configured)
@click.option("--detach", is_flag=True, help="Start it in the background, and return when it can be reached.")
@click.option("--stop", "stopping", is_flag=True, help="End the broker that runs there.")
@click.option("--linger", is_flag=True, help="Leave with the last session.")
@click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path),
    help="Where it meets its sessions. [default: $IPCSYNC_RUNTIME_DIR, or /dev/shm/ipcsync-<uid>]",
)
@click.option("--http", metavar="HOST:PORT", help="Serve a page, /metrics and /healthz there. [default: no]")
@click.option("--tcp", metavar="tcp://HOST:PORT", help="Serve there too, by keys: see `ipcsync keys`. [default: no]")
@click.option(
    "--allow-uid",
    type=click.IntRange(0, 2**32 - 2),
    multiple=True,
    help="Let this uid in too, and trust it as our own: it shares all memory. May be given again. [default: nobody]",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--ready-fd", type=int, hidden=True)
def broker(
    detach: bool,
    stopping: bool,
    linger: bool,
    runtime_dir: Path | None,
    http: str | None,
    tcp: str | None,
    allow_uid: tuple[int, ...],
    log_format: str,
    log_level: str,
    ready_fd: int | None,
    **limits: int | None,
) -> None:
    """Serves one runtime directory, in the foreground until SIGTERM or Ctrl-C.

    Every option can also be set in the file's table [broker] or as IPCSYNC_BROKER_...: `ipcsync config` shows them.

    Exit status: 2 the directory cannot be used, 3 a broker runs there already (or, for --stop, none does).
    """
    from . import launch, logs
    from .model import Quotas

    given = {name.removeprefix("max_"): value for name, value in limits.items() if value is not None}
    try:
        if stopping:
            click.echo(f"stopped broker (pid {launch.stop(runtime_dir)})")
        elif detach:
            options = [f"--max-{name.replace('_', '-')}={value}" for name, value in given.items()]
            options += [f"--log-format={log_format}", f"--log-level={log_level}", *([f"--http={http}"] if http else [])]
            options += [f"--tcp={tcp}"] if tcp else []
            options += [f"--allow-uid={uid}" for uid in allow_uid]
            child = launch.start(runtime_dir, linger=linger, options=options)
            click.echo(f"broker (pid {child.pid}) serves {runtime.directory(runtime_dir, create=False)}")
        else:
            quotas = Quotas(**{name.replace("bytes", "nbytes"): value for name, value in given.items()})
            logs.setup(log_format, log_level)
            launch.serve(
                runtime_dir,
                quotas=quotas,
                linger=linger,
                http=http,
                tcp=tcp,
                allow_uids=frozenset(allow_uid),
                ready=lambda: _tell(ready_fd),
            )
    except IpcSyncError as error:
        click.echo(f"ipcsync broker: {error}", err=True)
        sys.exit(EXIT.get(type(error), 1))


for _name, _text in _QUOTAS.items():
    broker.params.append(click.Option([f"--max-{_name}"], type=click.IntRange(min=1), help=_text))


def _tell(fd: int | None) -> None:
    """The one who started us waits for this byte; if we fail, for the end of the pipe."""
    if fd is not None:
        os.write(fd, b"1")
        os.close(fd)


if __name__ == "__main__":
    broker(prog_name="ipcsync broker")
