"""``ipcsync run``, from a pipeline file to its closing table; and ``ipcsync worker``, one stage by hand."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from ipcsync import linux
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
@click.option(
    "--mps", is_flag=True, help="Share the GPU at once: under a private MPS daemon, stopped when its last user leaves."
)
def run(file: Path, overrides: tuple[str, ...], json_file: Path | None, trace_file: Path | None, mps: bool) -> None:
    """Run the pipeline in FILE until its sources are exhausted.

    A broker is started if none runs, and again should it die. Ctrl-C finishes the items that were begun; a second one
    stops at once. Exit status: 0 done, 1 a stage failed, 2 the file or the arguments are wrong, 3 no broker could be
    reached or started, 130 interrupted.
    """
    sys.exit(run_file(file, overrides, json_file, trace_file, mps=mps))


def run_file(
    file: Path,
    overrides: tuple[str, ...] = (),
    json_file: Path | None = None,
    trace_file: Path | None = None,
    *,
    mps: bool = False,
) -> int:
    """What the command does; returns its exit status."""
    from .pipeline import load
    from .report import report, table
    from .supervisor import Supervisor
    from .terminal import Terminal

    linux.keep_standard_descriptors()
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # whatever a stage says can be shown
    errors = _console(stderr=True)
    for option, wanted in (("--json", json_file), ("--trace", trace_file)):
        if wanted is not None and not wanted.absolute().parent.is_dir():
            raise click.UsageError(f"{option}: there is no folder {wanted.absolute().parent}")
    try:
        pipeline = load(file, overrides)
        with _shared(mps, errors), _traced(trace_file) as parts, Terminal(errors, list(pipeline.stages)) as show:
            again = max((plan.restart_limit for plan in pipeline.stages.values() if plan.restart != "never"), default=0)
            for attempt in range(1, again + 2):
                supervisor = Supervisor(pipeline, show, trace=parts, mps=mps)
                supervisor.run()
                if not supervisor.device_lost or supervisor.interrupted or attempt > again:
                    break
                show.notice(f"the GPU's contexts are lost: the whole run starts again ({attempt} of {again})")
                supervisor.close()
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
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        _console().print(table(record))
    except OSError as error:
        _say(errors, f"the closing table could not be written: {error}")
        return FAILED
    if record["status"] == "interrupted":
        return 128 + (supervisor.interrupted or 0)
    return DONE if record["status"] == "done" else FAILED


@click.command()
@click.argument("call", required=False)
@click.option("--input", "inputs", multiple=True, metavar="NAME", help="A channel to read. May be given many times.")
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="A channel to write. May be given many times.")
@click.option(
    "--param", "params", multiple=True, metavar="KEY=VALUE", help="A parameter of the stage, as TOML or text."
)
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="A pipeline file that says what its channels are: those that are not there yet are created.",
)
@click.option("--stage", metavar="NAME", help="A stage of --file: its call, channels, params, device and policy.")
@click.option("--name", metavar="NAME", help="The session's name. [default: the stage, or the function]")
@click.option(
    "--device", metavar="DEVICE", help="Where the stage computes: cpu, cuda, cuda:1. [default: cuda if there is one]"
)
@click.option("--policy", type=click.Choice(["block", "latest"]), help="Of its inputs. [default: block]")
@click.option("--group", metavar="NAME", help="Workers with one group share the items of their input.")
@click.option("--readers", default=1, show_default=True, help="Begin when each output has so many readers.")
@click.option("--patient", is_flag=True, help="If the writer of an input dies, wait for another one.")
@click.option(
    "--keep-open", is_flag=True, help="Leave the outputs open on failure or a signal: another worker goes on."
)
@click.option(
    "--timeout", default=30.0, show_default=True, metavar="SECONDS", help="For the broker and the channels to appear."
)
@click.option("--namespace", metavar="NAME", help="Where the channels' names live. [default: $IPCSYNC_NAMESPACE]")
@click.option(
    "--runtime-dir", type=click.Path(path_type=Path), help="Where the broker is. [default: $IPCSYNC_RUNTIME_DIR]"
)
def worker(**options: Any) -> None:
    """Run one stage, CALL (module:function), against a running broker.

    For pipelines that systemd or Kubernetes starts, one service or container a stage. SIGINT or SIGTERM: the stage
    finishes the item it has, takes no other and leaves; a second one stops it at once. Exit status: 0 the stage has
    returned, 1 it failed, 2 the arguments are wrong, 3 no broker could be reached, 130 or 143 it left on a signal.
    """
    from .byhand import work

    sys.exit(work(**options))


@contextmanager
def _shared(mps: bool, errors: Console) -> Iterator[None]:
    """With `mps`, what is started meanwhile, the broker too, is a client of a private MPS daemon."""
    if not mps:
        yield
        return
    from ipcsync import runtime
    from ipcsync.mps import COST, Daemon, check_broker

    directory = runtime.directory(create=True)
    with Daemon(directory).used() as environment:
        check_broker(directory, environment)
        _say(errors, f"note: {COST}")
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


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


class _Lossy:
    """Standard error, where what cannot be written (the disk is full, the reader is gone) does not end the run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _console(*, stderr: bool = False) -> Console:
    """Wide enough for the table where the output is no terminal, so that nothing is cut out of a log."""
    from rich.console import Console

    file: Any = _Lossy(sys.stderr) if stderr and sys.stderr is not None else None
    console = Console(stderr=stderr, file=file)
    return console if console.is_terminal else Console(stderr=stderr, file=file, width=160)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
