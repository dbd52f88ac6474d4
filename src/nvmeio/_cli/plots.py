"""Charts of measurements, by matplotlib."""

import itertools
import math
import statistics
from typing import Any

from nvmeio._cli.samples import PERCENTILES, Contest
from nvmeio._cli.trials import GRID_BLOCKS, GRID_DEPTHS, Options


def bars(contests: list[Contest], about: str) -> Any:
    """Draw throughput, with the rounds' range, and latencies of contenders."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [(contest, name) for contest in contests for name in contest.samples]
    names = list(dict.fromkeys(name for _, name in rows))
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    marks = dict(zip(PERCENTILES, "osD", strict=True))
    figure = Figure(figsize=(11, 2.2 + 0.42 * len(rows)), layout="constrained")
    figure.suptitle(about, fontsize="medium")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, (contest, name) in enumerate(rows):
        speeds = contest.figures(name, "gb_per_s")
        middle = statistics.median(speeds)
        whisker = [[middle - min(speeds)], [max(speeds) - middle]]
        bar = left.barh(place, middle, color=colours[name], xerr=whisker, capsize=3)
        # Label the bars: next to memory copies, that of a random read is very short.
        left.bar_label(bar, fmt="%.2f", padding=4, fontsize="small")
        for percentile, mark in marks.items():
            latency = contest.latency_us(name, percentile)
            if latency is not None:
                right.plot(latency / 1e3, place, mark, color=colours[name], alpha=0.8)
    left.set_xlabel("throughput, GB/s (10⁹ bytes a second)")
    left.set_ylabel("work")
    left.margins(x=0.15)
    left.set_yticks(range(len(rows)), [contest.work for contest, _ in rows])
    left.invert_yaxis()
    right.set_xscale("log")
    _name_some_ticks(right)
    right.set_xlabel("latency of an I/O, ms (median of the rounds)")
    left.grid(axis="x", alpha=0.3)
    right.grid(axis="x", alpha=0.3)
    keys: list[Any] = [Patch(color=colours[name], label=name) for name in names]
    keys += [
        Line2D([], [], marker=mark, color="grey", linestyle="", label=f"p{percentile:g}")
        for percentile, mark in marks.items()
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys))
    return figure


def _name_some_ticks(axes: Any) -> None:
    """Label each decade of a logarithmic axis; if there are few, also 2 and 5 times it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim()
    parts = (1, 2, 5) if high < low * 1e3 else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=parts))
    ends = [part * 10.0**power for power in range(-4, 8) for part in parts]
    axes.set_xlim(
        max((end for end in ends if end <= low), default=low),
        min((end for end in ends if end >= high), default=high),
    )


def heat_map(speeds: list[tuple[Options, dict[str, float]]], about: str) -> Any:
    """Draw GB/s of "read" and of "write" for every block size and queue depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(about, fontsize="medium")
    for axes, op in zip(figure.subplots(1, 2), ("read", "write"), strict=True):
        cells = [[math.nan] * len(GRID_DEPTHS) for _ in GRID_BLOCKS]
        for options, found in speeds:
            row = GRID_BLOCKS.index(options["block_size"])
            cells[row][GRID_DEPTHS.index(options["queue_depth"])] = found[op]
        image = axes.imshow(cells, aspect="auto", origin="lower", cmap="viridis")
        rows, columns = range(len(GRID_BLOCKS)), range(len(GRID_DEPTHS))
        for row, column in itertools.product(rows, columns):
            axes.text(
                column,
                row,
                f"{cells[row][column]:.2f}",
                ha="center",
                va="center",
                bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0},
            )
        axes.set_title(op)
        axes.set_xlabel("queue depth, blocks in flight")
        axes.set_xticks(columns, map(str, GRID_DEPTHS))
        axes.set_ylabel("block size, KiB")
        axes.set_yticks(rows, [str(block >> 10) for block in GRID_BLOCKS])
        figure.colorbar(image, ax=axes, label="GB/s (10⁹ bytes a second), median")
    return figure
