"""``ipcsync bench``."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from .. import __version__
from . import report
from .contest import Missing, Table

SECTIONS = ("round-trip", "channel", "calls", "pipeline", "scale", "import", "gpu")


def machine() -> dict[str, Any]:
    return {
        "ipcsync": __version__,
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": f"Linux {'.'.join(platform.release().split('-')[0].split('.')[:2])}",
        "python": platform.python_version(),
        "load before": round(os.getloadavg()[0], 1),
    }


def _section(name: str, gpu: dict[str, Any]) -> Callable[..., list[Table]]:
    from . import calls, host, scale, stages

    if name == "gpu":
        from .gpu import gpu as measure

        return lambda **more: measure(**gpu, **more)
    if name == "calls":
        return lambda **more: calls.calls("cpu", **more)
    functions: dict[str, Callable[..., list[Table]]] = {
        "round-trip": host.round_trip,
        "channel": host.channel,
        "pipeline": stages.stages,
        "scale": scale.scale,
        "import": host.imports,
    }
    return functions[name]


def measure(
    sections: tuple[str, ...], *, quick: bool, mps: bool, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Runs the sections one after the other; what one of them cannot do never keeps the rest from being measured."""
    tables: list[Table] = []
    missing: list[Missing] = []
    result: dict[str, Any] = {"machine": machine(), "quick": quick}
    for name in sections:
        say(f"{name} ...")
        start = time.monotonic()
        try:
            tables += _section(name, {"mps": mps})(quick=quick, missing=missing)
        except Exception as error:
            missing.append(Missing(name, f"{type(error).__name__}: {error}"))
        except KeyboardInterrupt:  # what was measured by now is worth having
            missing.append(Missing(f"{name}, and what comes after it", "interrupted"))
            break
        say(f"{name}: {time.monotonic() - start:.0f} s")
    missing += [Missing(name, "not asked for") for name in SECTIONS if name not in sections]
    result["tables"] = [dataclasses.asdict(table) for table in tables]
    result["not_measured"] = [dataclasses.asdict(each) for each in missing]
    return result


@click.command()
@click.option("--quick", is_flag=True, help="To see that it works, in less than a minute; not to measure.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(SECTIONS),
    help="Only these parts; may be given many times. [default: all]",
)
@click.option("--mps/--no-mps", default=True, help="Measure a GPU under a private MPS daemon as well. [default: yes]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to a file as JSON.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw them (needs ipcsync[plots]).")
def bench(quick: bool, only: tuple[str, ...], mps: bool, json_file: Path | None, plot_file: Path | None) -> None:
    """Measure this machine: ipcsync and what one would use instead, in the same run.

    All contestants stand ready at once and take turns; figures are medians and 99th percentiles over all repeats. It
    uses a runtime directory and a broker of its own. Run it on a quiet machine. What could not be measured is said,
    with the reason.
    """
    for option, wanted in (("--json", json_file), ("--plot", plot_file)):
        if wanted is not None and not wanted.absolute().parent.is_dir():
            raise click.UsageError(f"{option}: there is no folder {wanted.absolute().parent}")
    if plot_file is not None and find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'ipcsync[plots]'")
    sections = tuple(name for name in SECTIONS if not only or name in only)
    result = measure(sections, quick=quick, mps=mps, say=lambda text: click.echo(text, err=True))
    click.echo(report.text(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        report.plot(result, plot_file)
