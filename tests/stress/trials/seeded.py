"""Trials one after the other, each with random numbers of its own."""

import random

from workloads.common import report


def each_trial(first, count):
    """Yield the random numbers of each trial; tell the parent which seed is next.

    By the first seed and how many there are: a list of thousands is too long for a command.
    """
    for seed in range(first, first + count):
        report({"seed": seed})
        yield random.Random(seed)
