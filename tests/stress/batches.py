"""Trials in children, many in each: to start Python takes longer than most of them."""

import itertools
from collections import Counter

from children import Child

# For all trials of one child, on a machine that others use too.
WATCHDOG_S = 240


def run_batch(name, seeds, drawn, *, watchdog_s=WATCHDOG_S, **options):
    """Run a function of ``trials`` for the seeds that were drawn, in one child.

    The child says which seed it is at, by ``each_trial``, and in the end one report, which
    is returned.
    """
    child = Child(name, package="trials", watchdog_s=watchdog_s, seeds=drawn, **options)
    done = child.finish(check=False)
    begun = [said["seed"] for said in done.reports if "seed" in said]
    # The one that is to be repeated, should it have failed.
    seeds.current = begun[-1] if begun else drawn[0]
    assert not child.timed_out, f"{name} hangs\n{done.stderr}"
    assert done.status == 0, f"{name} ended with {done.status}\n{done.stderr}"
    assert begun == drawn
    return done.reports[-1]


def run_trials(name, seeds, *, batch=100, **options):
    """Run a function of ``trials`` for all seeds, so many in a child.

    Returns the sums of the counts that the children report, and in ``trials`` how many
    there were.
    """
    sums = Counter()
    while drawn := list(itertools.islice(seeds, batch)):
        sums.update(run_batch(name, seeds, drawn, **options))
        sums["trials"] += len(drawn)
    return sums
