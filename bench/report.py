"""What a comparison came to: as a record, as a table in the terminal and in Markdown, and as a picture.

rich and matplotlib are used where they are installed; a GPU machine may have neither.
"""

import json
import os
import platform
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ours and theirs, measured in turns: the two at one index belong together. Or a figure that stands for itself."""

    what: str
    unit: str
    ours: list[float]
    bare: list[float]
    """Empty: there is nothing to compare with, and the ratio is the figure itself."""
    target: float | None
    """What the ratio ours / bare should at most be; none: it is only told."""
    at_least: bool = False
    """The target is a lower bound."""

    @property
    def median_ours(self) -> float:
        return median(self.ours)

    @property
    def median_bare(self) -> float:
        return median(self.bare) if self.bare else 1.0

    @property
    def ratio(self) -> float:
        return self.median_ours / self.median_bare

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the ratios of single pairs: how much one pair says."""
        ratios = [a / b for a, b in zip(self.ours, self.bare or [1.0] * len(self.ours), strict=True)]
        if len(ratios) == 1:
            return ratios[0], ratios[0]
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return low, high

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    @property
    def target_text(self) -> str:
        unit = "" if self.bare else f" {self.unit}"
        return "-" if self.target is None else f"{'at least' if self.at_least else 'at most'} {self.target}{unit}"

    @property
    def measured_text(self) -> str:
        low, high = self.quartiles
        verdict = {True: ", met", False: ", NOT met", None: ""}[self.met]
        if not self.bare:
            return f"{self.ratio:.3f} {self.unit} ({low:.3f} to {high:.3f}){verdict}"
        medians = f"{self.median_ours:,.4g} against {self.median_bare:,.4g} {self.unit}"
        return f"{self.ratio:.3f} (pairs {low:.3f} to {high:.3f}){verdict}; {medians}"


@dataclass(frozen=True)
class Result:
    comparisons: list[Comparison]
    details: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, name: str, result: Result, *, quick: bool) -> None:
    """NAME.json: all figures, and where they come from."""
    record = {
        "name": name,
        "command": f"python -m bench {name}" + (" --quick" if quick else ""),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.platform(),
        "comparisons": [_record(comparison) for comparison in result.comparisons],
        "details": result.details,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def read(folder: Path, name: str) -> dict[str, Any]:
    """What was written of it last; empty if nothing was."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def summarize(folder: Path) -> None:
    """The table and the picture of every NAME.json in the folder, whenever and wherever it was measured."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [(_comparison(entry), record["command"]) for record in found for entry in record["comparisons"]]
    if not rows:
        return
    cells = [(c.what, c.target_text, c.measured_text, f"`{command}`") for c, command in rows]
    header = ("what", "target", "measured: ours / bare", "command")
    lines = [" | ".join(line) for line in (header, ("---",) * 4, *cells)]
    (folder / "summary.md").write_text("".join(f"| {line} |\n" for line in lines))
    _print(header, cells)
    if compared := [comparison for comparison, _ in rows if comparison.bare]:
        _draw(compared, folder / "summary.png")
    print(f"Written to {folder}.", file=sys.stderr)


def _record(comparison: Comparison) -> dict[str, Any]:
    derived = ("ratio", "quartiles", "met", "median_ours", "median_bare")
    return vars(comparison) | {name: getattr(comparison, name) for name in derived}


def _comparison(entry: dict[str, Any]) -> Comparison:
    return Comparison(**{name: entry[name] for name in Comparison.__dataclass_fields__})


def _print(header: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in cells:
            print(" | ".join(row))
        return
    table = Table(show_lines=True)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in cells:
        table.add_row(*row, style="red" if "NOT met" in row[2] else "")
    Console(highlight=False).print(table)


def pyplot() -> Any:
    """matplotlib's, or none."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed here, so there is no picture.", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _draw(comparisons: list[Comparison], path: Path) -> None:
    if (plt := pyplot()) is None:
        return
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.75 * len(comparisons)), layout="constrained")
    for row, comparison in enumerate(comparisons):
        _draw_bar(axes, row, comparison)
    axes.axvline(1.0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(comparisons)), [c.what.replace(", against", ",\nagainst") for c in comparisons])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(max(c.ratio, c.quartiles[1], c.target or 0) for c in comparisons))
    axes.set_xlabel("ours / bare: median, and the middle half of the pairs")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=80)  # many rows: it is to stay small
    plt.close(figure)


def _draw_bar(axes: Any, row: int, comparison: Comparison) -> None:
    color = {True: "#4c9f70", False: "#c44e52", None: "#8c8c8c"}[comparison.met]
    low, high = comparison.quartiles
    axes.barh(row, comparison.ratio, height=0.5, color=color)
    axes.hlines(row, low, high, color="black", linewidth=1.2)
    if comparison.target is not None:
        axes.vlines(comparison.target, row - 0.38, row + 0.38, color="black", linewidth=2)
    told = f"  {comparison.ratio:.3f}" + (f"  ({comparison.target_text})" if comparison.target else "")
    axes.text(0, row, told, va="center", color="white", weight="bold")
