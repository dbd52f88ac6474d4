"""Trials in children, many in each: to start Python takes longer than most of them."""

from collections import Counter

from children import Child

# For all trials of one child, on a machine that others use too.
WATCHDOG_S = 240


def run_batch(name, seeds, count, *, watchdog_s=WATCHDOG_S, **options):
    """Run a function of ``trials`` for so many of the seeds that are left, in one child.

    The child says which seed it is at, by ``each_trial``, and in the end one report, which
    is returned.
    """
    drawn = seeds.take(count)
    child = Child(
        name,
        package="trials",
        watchdog_s=watchdog_s,
        first=drawn.start,
        count=len(drawn),
        **options,
    )
    try:
        done = child.finish(check=False)
    finally:
        begun = [said["seed"] for said in child.reports if "seed" in said]
        # The one that is to be repeated, should it have failed, or hang.
        seeds.current = begun[-1] if begun else drawn.start
    where = "\n".join([done.stderr, *child.threads])
    assert not child.timed_out, f"{name} hangs\n{where}"
    assert done.status == 0, f"{name} ended with {done.status}\n{done.stderr}"
    assert begun == list(drawn)
    # What goes wrong from here on is no single trial's.
    seeds.current = None
    return done.reports[-1]


def run_trials(name, seeds, *, batch=100, **options):
    """Run a function of ``trials`` for all seeds, so many in a child.

    Returns the sums of the counts that the children report, and in ``trials`` how many
    there were.
    """
    sums = Counter()
    while seeds.left:
        count = min(batch, seeds.left)
        sums.update(run_batch(name, seeds, count, **options))
        sums["trials"] += count
    return sums
