"""Charts have labelled axes, and show the numbers that they are made of."""

import itertools

import pytest

from nvmeio._cli import plots
from nvmeio._cli.samples import Contest, Sample
from nvmeio._cli.trials import DEFAULT, GRID_BLOCKS, GRID_DEPTHS


def sample(speed, latency):
    """Return a sample of one second at a speed in GB/s."""
    latencies = {50.0: latency, 99.0: 2 * latency, 99.9: 3 * latency} if latency else {}
    return Sample(int(speed * 1e9), 1000 if latency else 0, 1.0, 0.1, latencies)


@pytest.fixture
def contests():
    read = Contest("read", 1, {})
    read.samples = {
        "nvmeio": [sample(2, 100), sample(3, 120), sample(1, 90)],
        "fio (io_uring)": [sample(1.5, 110)] * 3,
    }
    copy = Contest("copy in memory", 1, {})
    copy.samples = {"nvmeio": [sample(20, 0)], "numpy": [sample(10, 0)]}
    return [read, copy]


def test_bars_name_their_quantities_units_and_contenders(contests):
    figure = plots.bars(contests, "1 GiB on a disk")
    left, right = figure.axes
    assert "throughput, GB/s" in left.get_xlabel()
    assert left.get_ylabel() == "work"
    assert "latency of an I/O, ms" in right.get_xlabel()
    rows = ["read", "read", "copy in memory", "copy in memory"]
    assert [label.get_text() for label in left.get_yticklabels()] == rows
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["nvmeio", "fio (io_uring)", "numpy", "p50", "p99", "p99.9"]
    assert figure.get_suptitle() == "1 GiB on a disk"


@pytest.mark.parametrize(
    "milliseconds", [(1.31, 38.8), (26.2, 38.8), (30.0, 30.0), (0.01, 1.2), (0.02, 6000)]
)
def test_latencies_can_be_read_from_the_axis(milliseconds):
    read = Contest("read", 1, {})
    read.samples = {
        str(number): [Sample(1, 1, 1.0, 0.1, dict.fromkeys((50.0, 99.0, 99.9), ms * 1e3))]
        for number, ms in enumerate(milliseconds)
    }
    figure = plots.bars([read], "")
    figure.draw_without_rendering()
    axis = figure.axes[1].xaxis
    low, high = figure.axes[1].get_xlim()
    named = [
        label
        for label in (*axis.get_majorticklabels(), *axis.get_minorticklabels())
        if label.get_text() and low <= label.get_position()[0] <= high
    ]
    assert len(named) >= 2
    places = sorted((label.get_window_extent() for label in named), key=lambda box: box.x0)
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(places))


def test_bars_are_as_long_as_the_medians(contests):
    left, right = plots.bars(contests, "").axes
    assert [bar.get_width() for bar in left.patches] == [2, 1.5, 20, 10]
    # The copy has no I/O, so no latency.
    milliseconds = [line.get_xdata()[0] for line in right.lines]
    assert milliseconds == [0.1, 0.2, 0.3, 0.11, 0.22, 0.33]
    assert [label.get_text() for label in left.texts] == ["2.00", "1.50", "20.00", "10.00"]


def test_a_heat_map_names_its_axes_and_shows_the_grid():
    grid = [
        {**DEFAULT, "block_size": block, "queue_depth": depth}
        for block, depth in itertools.product(GRID_BLOCKS, GRID_DEPTHS)
    ]
    speeds = [
        (options, {"read": number / 10, "write": number / 5})
        for number, options in enumerate(grid)
    ]
    # The order does not matter: the default comes first.
    speeds.sort(key=lambda pair: pair[0] != DEFAULT)
    figure = plots.heat_map(speeds, "a disk")
    maps = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in maps] == ["read", "write"]
    for axes, scale in zip(maps, (10, 5), strict=True):
        assert axes.get_xlabel() == "queue depth, blocks in flight"
        assert axes.get_ylabel() == "block size, KiB"
        depths = [label.get_text() for label in axes.get_xticklabels()]
        assert depths == [str(depth) for depth in GRID_DEPTHS]
        blocks = [label.get_text() for label in axes.get_yticklabels()]
        assert blocks == [str(block >> 10) for block in GRID_BLOCKS]
        cells = axes.images[0].get_array().flatten().tolist()
        assert cells == [number / scale for number in range(len(grid))]
    bars = [axes for axes in figure.axes if not axes.get_title()]
    assert all("GB/s" in axes.get_ylabel() for axes in bars)
    assert len(bars) == 2
