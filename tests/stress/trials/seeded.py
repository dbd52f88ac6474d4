"""Trials one after the other, each with lots of its own."""

import random

from workloads.common import report


def each_trial(first, count):
    """Yield what draws the lots of each trial; tell the parent which seed is next.

    By the first seed and how many there are: a list of thousands is too long for a command.
    """
    for seed in range(first, first + count):
        report({"seed": seed})
        yield random.Random(seed)
