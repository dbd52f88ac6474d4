"""Numbers are written with units for people."""

import pytest

from nvmeio._arguments.units import in_binary
from nvmeio._cli.terminal import in_time, sizes, spread


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        ((1 << 30) - (1 << 20), "1023 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1 TiB"),
        (1500 << 40, "1.46 PiB"),
        (1 << 60, "1 EiB"),
    ],
)
def test_sizes_have_the_largest_unit_that_fits(nbytes, text):
    assert in_binary(nbytes) == text


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0.5, "0.5 us"),
        (85.04, "85 us"),
        (999.4, "999 us"),
        (1234.0, "1.23 ms"),
        (56_000, "56 ms"),
        (2_500_000, "2.5 s"),
        (float("inf"), "inf s"),
    ],
)
def test_latencies_have_three_digits(microseconds, text):
    assert in_time(microseconds) == text


def test_sizes_that_would_look_alike_show_their_bytes():
    assert sizes(1 << 30, 5 << 29) == ["1 GiB", "2.5 GiB"]
    assert sizes(1 << 30, (1 << 30) + 1) == [
        "1 GiB (1073741824 bytes)",
        "1 GiB (1073741825 bytes)",
    ]


def test_a_spread_is_median_minimum_and_maximum():
    assert spread([3.0, 1.0, 2.25], 2) == "2.25 [1.00-3.00]"
    assert spread([3.14159], 3) == "3.142"
