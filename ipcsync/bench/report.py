"""A run of the benchmarks for people: tables, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def text(result: dict[str, Any]) -> str:
    """Markdown, as it stands in docs/benchmarks.md. Each line says how it compares with ours, in this run."""
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items())]
    for table in result["tables"]:
        lines += ["", *_table(table)]
        if table["note"]:
            lines += ["", table["note"]]
    if result["not_measured"]:
        lines += ["", "Not measured:", *(f"- {each['what']}: {each['why']}" for each in result["not_measured"])]
    return "\n".join(lines)


def _table(table: dict[str, Any]) -> list[str]:
    rows, unit = table["rows"], f", {table['unit']}" if table["unit"] else ""
    ours = rows.get(table["ours"], {}).get("median")
    figures = [("median", f"median{unit}")]
    if not table["more_is_better"]:  # of rates there is one a repeat
        figures.append(("p99", f"p99{unit}"))
    heads = [table["title"], *(head for _, head in figures), "least, most repeat"]
    heads += [] if ours is None else ["ours is better by ×"]
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for name, row in rows.items():
        cells = [name, *(number(row[key]) for key, _ in figures), f"{number(row['least'])}, {number(row['most'])}"]
        lines.append(_line(cells if ours is None else [*cells, f"{ratio(table, name):.2f}"]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def ratio(table: dict[str, Any], name: str) -> float:
    """How much better ours is than `name`: times less of what is bad, or more of what is good."""
    ours, theirs = table["rows"][table["ours"]]["median"], table["rows"][name]["median"]
    return float(ours / theirs if table["more_is_better"] else theirs / ours)


def plot(result: dict[str, Any], out: Path) -> None:
    """A bar for every row of every table with a peer; the line across it goes from the best repeat to the worst."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tables = [table for table in result["tables"] if table["rows"] and (table["ours"] or len(table["rows"]) > 1)]
    heights = [0.7 + 0.28 * len(table["rows"]) for table in tables]
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(9, sum(heights)), gridspec_kw={"height_ratios": heights}, squeeze=False
    )
    for axis, table in zip(axes[:, 0], tables, strict=True):
        names = list(table["rows"])[::-1]
        rows = [table["rows"][name] for name in names]
        values = [row["median"] for row in rows]
        spread = [
            [max(0.0, row["median"] - row["least"]) for row in rows],
            [max(0.0, row["most"] - row["median"]) for row in rows],
        ]
        colours = ["tab:green" if name == table["ours"] else "tab:gray" for name in names]
        axis.barh(names, values, xerr=spread, color=colours, ecolor="black", capsize=2)
        axis.set_title(f"{table['title']}{', ' + table['unit'] if table['unit'] else ''}", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        if min(values) > 0 and max(values) > 50 * min(values):
            axis.set_xscale("log")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)
