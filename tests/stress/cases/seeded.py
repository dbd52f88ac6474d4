"""Run cases one after the other, each with its own random numbers."""

import random

from workloads.common import report


def each_case(first, count):
    """Yield the random numbers of each case; report each seed to the parent.

    The arguments are the first seed and the count, because a list of thousands is too long
    for a command line.
    """
    for seed in range(first, first + count):
        report({"seed": seed})
        yield random.Random(seed)
