"""``ipcsync run``: from a pipeline file to its closing table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from ipcsync.errors import BrokerUnavailable, IpcSyncError, PermissionDenied, PipelineInvalid, RuntimeDirectory
from ipcsync.trace import merge

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, INVALID, NO_BROKER, INTERRUPTED = 0, 1, 2, 3, 130


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the file: --set stages.read.params.folder=DIR. May be given many times.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the closing table to a file as JSON.")
@click.option("--trace", "trace_file", type=click.Path(path_type=Path), help="Write a Chrome/Perfetto trace to a file.")
def run(file: Path, overrides: tuple[str, ...], json_file: Path | None, trace_file: Path | None) -> None:
    """Run the pipeline in FILE until its sources are exhausted.

    A broker is started if none runs. Ctrl-C finishes the items that were begun; a second one stops at once. Exit
    status: 0 done, 1 a stage failed, 2 the file or the arguments are wrong, 3 no broker could be reached or started,
    130 interrupted.
    """
    sys.exit(run_file(file, overrides, json_file, trace_file))


def run_file(
    file: Path, overrides: tuple[str, ...] = (), json_file: Path | None = None, trace_file: Path | None = None
) -> int:
    """What the command does; returns its exit status."""
    from .pipeline import load
    from .report import report, table
    from .supervisor import Supervisor
    from .terminal import Terminal

    errors = _console(stderr=True)
    for option, wanted in (("--json", json_file), ("--trace", trace_file)):
        if wanted is not None and not wanted.absolute().parent.is_dir():
            raise click.UsageError(f"{option}: there is no folder {wanted.absolute().parent}")
    try:
        pipeline = load(file, overrides)
        with _traced(trace_file) as parts, Terminal(errors, list(pipeline.stages)) as show:
            supervisor = Supervisor(pipeline, show, trace=parts)
            supervisor.run()
    except KeyboardInterrupt:  # before there was anything to drain
        return INTERRUPTED
    except PipelineInvalid as error:
        _say(errors, str(error))
        return INVALID
    except (BrokerUnavailable, RuntimeDirectory, PermissionDenied) as error:
        _say(errors, f"no broker: {error}")
        return NO_BROKER
    except IpcSyncError as error:
        _say(errors, f"{type(error).__name__}: {error}")
        return FAILED
    record = report(supervisor)
    supervisor.close()
    for name, stage in record["stages"].items():
        # Where no stage failed of itself, what stopped the others (a peer that died) is all there is to show.
        if stage["error"] and (stage["state"] == "failed" or (not record["failed"] and record["status"] == "failed")):
            _say(errors, f"stage {name!r} failed:\n{stage['error'].rstrip()}")
    _console().print(table(record))
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if record["status"] == "interrupted":
        return 128 + (supervisor.interrupted or 0)
    return DONE if record["status"] == "done" else FAILED


@contextmanager
def _traced(out: Path | None) -> Iterator[Path | None]:
    """A folder for the workers' parts of a trace, merged into `out` however the run ends; None: no trace."""
    if out is None:
        yield None
        return
    with TemporaryDirectory(prefix="ipcsync-trace-") as folder:
        try:
            yield Path(folder)
        finally:
            merge(sorted(Path(folder).iterdir()), out)


def _console(*, stderr: bool = False) -> Console:
    """Wide enough for the table where the output is no terminal, so that nothing is cut out of a log."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
