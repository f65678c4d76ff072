"""A run on the terminal: a progress bar a stage, and what the stages print, each line under its stage's name."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from .report import total_of
from .supervisor import StageRun

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Terminal:
    """Shows on `console` (standard error). Bars only where it is a terminal; lines always, never wrapped."""

    def __init__(self, console: Console, stages: list[str]) -> None:
        self._console = console
        self._width = max(map(len, stages), default=0)
        self._colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(stages)}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:>8,.0f} items"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def line(self, stage: str, text: str) -> None:
        """A line that a stage printed."""
        shown = Text.assemble((f"{stage:<{self._width}} | ", self._colour.get(stage, "")))
        shown.append_text(Text.from_ansi(text) if self._console.is_terminal else Text(text))
        self._print(shown)

    def notice(self, text: str) -> None:
        """A line of the supervisor's own."""
        self._print(Text(text, style="bold"))

    def tick(self, stages: dict[str, StageRun]) -> None:
        """Moves the bars."""
        if not self._console.is_terminal:
            return
        for name, stage in stages.items():
            ports = stage.counters.inputs or stage.counters.outputs
            items = sum(port.items for port in ports.values())
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(f"[{self._colour[name]}]{name}", total=None, state="")
            total = items if stage.state == "done" else total_of(name, stages)
            self._progress.update(self._tasks[name], completed=items, total=total, state=stage.state)
        self._progress.refresh()

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)
