"""``ipcsync status``, ``top``, ``events``, ``channels``, ``why``, ``condemn`` and ``logs``: looking at a broker.

Without a broker each says so in one sentence and ends with status 3, as ``ipcsync run`` does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType

from . import ask, runtime, show
from .errors import BrokerUnavailable, IpcSyncError, PermissionDenied, RuntimeDirectory
from .overview import KINDS, overview, rates

NO_BROKER, BAD = 3, 2
F = TypeVar("F", bound=Callable[..., Any])


def _command(function: F) -> F:
    """Options and errors that all of these share."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except IpcSyncError as error:
            click.echo(f"ipcsync: {error}", err=True)
            none = isinstance(error, BrokerUnavailable)
            sys.exit(NO_BROKER if none else BAD if isinstance(error, RuntimeDirectory | PermissionDenied) else 1)

    where = click.option(
        "--runtime-dir",
        type=click.Path(path_type=Path),
        help="Of the broker. [default: $IPCSYNC_RUNTIME_DIR, or /dev/shm/ipcsync-<uid>]",
    )
    return where(guarded)  # type: ignore[return-value]


def _json(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")(function)


def _look(runtime_dir: Path | None) -> dict[str, Any]:
    where = ask.find(runtime_dir)
    with ask.Asker(where) as asker:
        return overview(where, asker.status())


def _print(seen: Any, shown: Callable[[], RenderableType], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(seen, indent=2))
    else:
        Console().print(shown())


@click.command()
@_json
@_command
def status(runtime_dir: Path | None, as_json: bool) -> None:
    """Shows the broker, its sessions, and all that they share."""
    seen = _look(runtime_dir)
    _print(seen, lambda: show.everything(seen), as_json)


@click.command()
@click.option("--namespace", help="Only this one's.")
@_json
@_command
def events(runtime_dir: Path | None, namespace: str | None, as_json: bool) -> None:
    """Lists events: rounds issued and completed, and who records them."""
    seen = _only(_look(runtime_dir), namespace)
    _print(seen["events"], lambda: show.events(seen), as_json)


@click.command()
@click.option("--namespace", help="Only this one's.")
@_json
@_command
def channels(runtime_dir: Path | None, namespace: str | None, as_json: bool) -> None:
    """Lists channels: items, how full they are, who writes and who reads."""
    seen = _only(_look(runtime_dir), namespace)
    _print(seen["channels"], lambda: show.channels(seen), as_json)


def _only(seen: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    if namespace is None:
        return seen
    return {**seen, **{kind: [t for t in seen[kind] if t["namespace"] == namespace] for kind in KINDS}}


@click.command()
@click.option("--interval", default=1.0, type=click.FloatRange(min=0.1), help="Seconds between two looks.")
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks.")
@_command
def top(runtime_dir: Path | None, interval: float, count: int | None) -> None:
    """Shows the same as status, live, with rates; Ctrl-C ends it."""
    from rich.live import Live

    where = ask.find(runtime_dir)
    console = Console()
    before: tuple[float, dict[str, Any]] | None = None
    done = 0
    with ask.Asker(where) as asker, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                seen, now = overview(where, asker.status()), time.monotonic()
                per_second = rates(before and before[1], seen, now - before[0] if before else 0.0)
                live.update(show.everything(seen, per_second), refresh=True)
                before, done = (now, seen), done + 1
                if done == count:
                    return
                time.sleep(interval)
        except KeyboardInterrupt:
            pass


@click.command()
@click.argument("name")
@_json
@_command
def why(runtime_dir: Path | None, name: str, as_json: bool) -> None:
    """Says who waits for whom: NAME is a session (a stage), or an event, channel or array (NAMESPACE/NAME for one).

    It follows every wait to the stage or the dead process that holds it all up, and names a deadlock. It reads the
    shared page, so it answers without a broker as well. Exit status 4: a deadlock.
    """
    from . import why as chains
    from . import why_ledger
    from .ledger import Ledger

    where = runtime.directory(runtime_dir, create=False)
    try:
        ledger = Ledger.open(where / runtime.LEDGER)
    except FileNotFoundError:
        raise BrokerUnavailable(f"no broker has run in {where}: there is nothing to look at") from None
    told: dict[str, Any] = {}
    if runtime.broker_pid(where) is not None:
        with ask.Asker(where) as asker:
            try:
                told = asker.status()
            except BrokerUnavailable as error:
                click.echo(f"ipcsync: {error}; this is from the ledger alone", err=True)
    try:
        picture = why_ledger.read(ledger, status=told)
    finally:
        ledger.region.close()
    starts = chains.find(picture, name)
    if not starts:
        raise click.ClickException(f"there is no session and no event, channel or array {name!r} here")
    chain = chains.follow(picture, *starts)
    if as_json:
        click.echo(json.dumps(chains.as_json(chain), indent=2))
    else:
        click.echo(chains.sentences(chain) or f"nobody waits for {name!r}, and it waits for nobody")
    sys.exit(4 if chain.deadlocks else 0)


@click.command()
@click.argument("name")
@click.option("--namespace", default="default", envvar="IPCSYNC_NAMESPACE", show_default=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_command
def condemn(runtime_dir: Path | None, name: str, namespace: str, yes: bool) -> None:
    """Ends an event, channel or array by force: an operator's last resort.

    Whoever waits for NAME, now or later, gets PeerDied, and so does all that hangs on it. There is no way back: the
    name must be created anew.
    """
    import ipcsync

    from . import wire

    where = ask.find(runtime_dir)
    seen = _only(_look(where), namespace)
    found = [t for kind in KINDS for t in seen[kind] if t["name"] == name and t["named"]]
    if not found:
        raise click.ClickException(f"there is no event, channel or array {name!r} in namespace {namespace!r}")
    thing = found[0]
    if not yes:
        told = f"{thing['kind']} {name!r}: {thing['issued']} issued, {thing['attached']} sessions attached"
        click.confirm(f"{told}. End it for all of them?", abort=True)
    with ipcsync.connect(where, name="operator", namespace=namespace) as session:
        session.request("condemn", wire.Condemn(name=name, reason="operator"), wire.Empty, session.deadline())
    click.echo(f"condemned {thing['kind']} {name!r}")


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on as it grows, until Ctrl-C or the broker's end.")
@click.option("-n", "--lines", default=100, show_default=True, type=click.IntRange(min=0))
@_command
def logs(runtime_dir: Path | None, follow: bool, lines: int) -> None:
    """Prints what a broker in the background says (`ipcsync broker --detach`, or one that a session started)."""
    where = runtime.directory(runtime_dir, create=False)
    path = where / "broker.log"
    pid = runtime.broker_pid(where)
    if not path.exists():
        if pid is None:
            ask.find(where)
        raise click.ClickException(f"the broker (pid {pid}) writes to {_stderr(pid)}, not to a file here")
    with path.open(errors="replace") as file:
        said = file.readlines()
        click.echo("".join(said[max(0, len(said) - lines) :]), nl=False)
        try:
            while follow and (line := _next(file, where)) is not None:
                click.echo(line, nl=False)
        except KeyboardInterrupt:
            pass


def _next(file: Any, where: Path) -> str | None:
    """The next line, once there is one; None when the broker has left and all is read."""
    while True:
        gone = runtime.broker_pid(where) is None
        line: str = file.readline()
        if line:
            return line
        if gone:
            return None
        time.sleep(0.1)


def _stderr(pid: int | None) -> str:
    try:
        target = os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return "its own stderr"
    return "the journal or a pipe (try `journalctl`)" if target.startswith(("socket:", "pipe:")) else target
