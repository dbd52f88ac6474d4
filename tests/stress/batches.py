"""Trials in children, many in each: to start Python takes longer than most of them."""

import itertools
from collections import Counter

from children import Child

# For all trials of one child, on a machine that others use too.
WATCHDOG_S = 600


def run_trials(name, seeds, *, batch=100, **options):
    """Run a function of ``trials`` for all seeds, so many in a child.

    The child says which seed it is at, by ``each_trial``, and in the end one report of
    counts.  Returns the sums of the counts, and in ``trials`` how many there were.
    """
    sums = Counter()
    while drawn := list(itertools.islice(seeds, batch)):
        child = Child(name, package="trials", watchdog_s=WATCHDOG_S, seeds=drawn, **options)
        done = child.finish(check=False)
        begun = [said["seed"] for said in done.reports if "seed" in said]
        # The one that is to be repeated, should it have failed.
        seeds.current = begun[-1] if begun else drawn[0]
        assert not child.timed_out, f"{name} hangs\n{done.stderr}"
        assert done.status == 0, done.stderr
        assert begun == drawn
        sums.update(done.reports[-1])
        sums["trials"] += len(drawn)
    return sums
