"""Trials one after the other, each with lots of its own."""

import random

from workloads.common import report


def each_trial(seeds):
    """Yield what draws the lots of each trial; tell the parent which seed is next."""
    for seed in seeds:
        report({"seed": seed})
        yield random.Random(seed)
