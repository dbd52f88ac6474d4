"""Draw the charts of the documentation from the JSON of `make bench`.

The metadata of each chart names the JSON that it was drawn from.  ``--check`` compares only
that, so it does not need matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparisons import SPEED, Comparison
from report import (
    Outcome,
    origin,
    overview_rows,
    picked,
    scripts_of,
    size_name,
    speed_of,
    speed_unit,
)
from tables import latest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CHARTS", "bars", "copies", "main", "overview", "save"]

HERE = Path(__file__).resolve().parent
AXES = {"GB/s": "speed in GB/s", "k/s": "thousand rows a second"}
COLOURS = ("tab:blue", "silver")


def canvas(height: float) -> tuple[Figure, Any]:
    """Make a figure and its axes. Imports matplotlib, which --check does not need."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.add_subplot()


def shared_name(comparisons: list[Comparison], index: int) -> str | None:
    """Return the name of the first or second candidate, if all comparisons share it."""
    names = {comparison.names[index] for comparison in comparisons}
    return names.pop() if len(names) == 1 else None


def labels_of(comparisons: list[Comparison]) -> list[str]:
    """Name each comparison: its work, and the candidates that the legend does not name."""
    if not shared_name(comparisons, 0):
        return [
            f"{comparison.work}\n{' / '.join(comparison.names)}"
            for comparison in comparisons
        ]
    if not shared_name(comparisons, 1):
        return [
            f"{comparison.work}\nbeside {comparison.names[1]}" for comparison in comparisons
        ]
    return [comparison.work for comparison in comparisons]


def bars(outcome: Outcome, title: str, pattern: str = "", log: bool = False) -> Figure:
    """Draw both candidates of some comparisons as bars, with whiskers from min to max."""
    comparisons = [
        comparison
        for comparison in picked(outcome, pattern)
        if speed_unit(comparison) in AXES
    ]
    figure, axes = canvas(1.5 + 0.5 * len(comparisons))
    axes.set_title(f"{title}\n{origin(outcome)}", fontsize="medium")
    if not comparisons:
        axes.text(0.5, 0.5, "not measured", ha="center")
        return figure
    unnamed = ("named first", "the other")
    for index, colour in enumerate(COLOURS):
        found = [comparison.of(index, speed_of(comparison)) for comparison in comparisons]
        middles = [statistics.median(values) for values in found]
        pairs = list(zip(found, middles, strict=True))
        whiskers = [[m - min(v) for v, m in pairs], [max(v) - m for v, m in pairs]]
        places = [place + 0.4 * index - 0.2 for place in range(len(comparisons))]
        label = shared_name(comparisons, index) or unnamed[index]
        axes.barh(places, middles, 0.4, xerr=whiskers, color=colour, capsize=2, label=label)
    axes.set_yticks(range(len(comparisons)), labels_of(comparisons), fontsize="small")
    axes.invert_yaxis()
    axes.margins(y=0.02)
    if log:
        axes.set_xscale("log")
        lowest = min(
            v
            for comparison in comparisons
            for i in (0, 1)
            for v in comparison.of(i, speed_of(comparison))
        )
        axes.set_xlim(left=10 ** math.floor(math.log10(lowest)))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"{AXES[speed_unit(comparisons[0])]}: median, minimum and maximum")
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small")
    return figure


def copies(outcome: Outcome) -> Figure:
    """Draw the ratios of copies over their sizes, one line per kind of copy and rival."""
    figure, axes = canvas(5)
    axes.set_title(f"Copies of arrays and tensors\n{origin(outcome)}", fontsize="medium")
    if not outcome.comparisons:
        axes.text(0.5, 0.5, "not measured", ha="center")
        return figure
    lines: dict[str, dict[int, float]] = {}
    factors = {size_name(1 << shift): 1 << shift for shift in range(10, 40)}
    for comparison in outcome.comparisons:
        size, _, what = comparison.work.partition(", ")
        name = f"beside {comparison.names[1]}: {what}"
        points = lines.setdefault(name, {})
        points[factors[size]] = statistics.median(SPEED.values(comparison))
    for name, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    sizes = sorted({nbytes for points in lines.values() for nbytes in points})
    axes.set_xticks(sizes, [size_name(nbytes) for nbytes in sizes], rotation=45)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("size of a copy")
    axes.set_ylabel("speed of nvmeio.memcpy / speed of the other")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize="small")
    return figure


def overview(scripts: dict[str, Outcome]) -> Figure:
    """Draw which share of the limit nvmeio and the usual tools reach."""
    figure, axes = canvas(6)
    where = origin(scripts.get("checkpoint", Outcome({}, [], [])))
    axes.set_title(f"Share of the drive's speed\n{where}", fontsize="medium")
    labels, shares = [], []
    for work, peer, _, ours, theirs, top in overview_rows(scripts):
        labels += [f"{work}: nvmeio", peer]
        shares += [100 * ours / top, 100 * theirs / top]
    if not shares:
        axes.text(0.5, 0.5, "not measured", ha="center")
        return figure
    colours = [COLOURS[number % 2] for number in range(len(shares))]
    drawn = axes.barh(range(len(shares)), shares, color=colours)
    axes.bar_label(drawn, [f"{share:.3g} %" for share in shares], padding=3, fontsize=8)
    axes.axvline(100, color="black", linewidth=0.8, label="a plain io_uring loop")
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    axes.set_xlabel("median speed, in percent of what a plain io_uring loop reaches")
    axes.legend(fontsize="small")
    return figure


# By script, whose name is also the name of the chart's file.
CHARTS: dict[str, Callable[[Outcome], Figure]] = {
    "transfer": lambda found: bars(found, "One large tensor beside fio", "/ fio$"),
    "checkpoint": lambda found: bars(found, "Whole files, not in the page cache"),
    "gather": lambda found: bars(found, "Random rows of 4 KiB", "4 KiB", log=True),
    "dataloader": lambda found: bars(
        found, "Random rows by data loaders", "ArrayDataset|BatchStream", log=True
    ),
    "copy": copies,
    "deepspeed": lambda found: bars(
        found, "The calls of DeepSpeed's op", "^(?!.*(2 threads|depth 8))"
    ),
}


def save(figure: Figure, path: Path, source: str = "") -> None:
    """Write a chart. The same matplotlib writes the same file for the same figures."""
    metadata = {"Software": None, "Source": source} if path.suffix == ".png" else None
    figure.savefig(path, dpi=80, metadata=metadata)


def main(given: list[str] | None = None) -> int:
    """Draw the charts, or check them, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    words = "only check that the charts were drawn from FILE"
    parser.add_argument("--check", action="store_true", help=words)
    words = "JSON written by `make bench` (the newest in bench/results)"
    parser.add_argument("--json", type=Path, metavar="FILE", help=words)
    parser.add_argument("--out", type=Path, default=HERE / "charts", help="for the charts")
    options = parser.parse_args(given)
    path = options.json or latest(HERE / "results")
    source = f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    scripts = scripts_of(path)
    if options.check:
        charts = [options.out / f"{name}.png" for name in (*CHARTS, "overview")]
        old = [
            chart.name
            for chart in charts
            if not chart.exists() or source.encode() not in chart.read_bytes()
        ]
        if old:
            print(f"charts: {', '.join(old)}: not drawn from {path.name} as it is")
        return int(bool(old))
    if importlib.util.find_spec("matplotlib") is None:
        print("charts: matplotlib is missing: pip install nvmeio[bench]", file=sys.stderr)
        return 1
    for name, draw in CHARTS.items():
        found = scripts.get(name, Outcome({}, [], []))
        save(draw(found), options.out / f"{name}.png", source)
    save(overview(scripts), options.out / "overview.png", source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
