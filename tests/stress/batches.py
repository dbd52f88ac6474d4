"""Run many cases in one child, because starting Python takes longer than most cases."""

from collections import Counter

from children import Child

# For all cases of one child, on a shared machine.
WATCHDOG_S = 240


def run_batch(name, seeds, count, *, watchdog_s=WATCHDOG_S, **options):
    """Run a function of ``cases`` in one child, for some of the remaining seeds.

    The child reports each seed with ``each_case``, and at the end one report, which is
    returned.
    """
    drawn = seeds.take(count)
    child = Child(
        name,
        package="cases",
        watchdog_s=watchdog_s,
        first=drawn.start,
        count=len(drawn),
        **options,
    )
    try:
        done = child.finish(check=False)
    finally:
        begun = [said["seed"] for said in child.reports if "seed" in said]
        # The seed to repeat, if its case fails or hangs.
        seeds.current = begun[-1] if begun else drawn.start
    where = "\n".join([done.stderr, *child.threads])
    assert not child.timed_out, f"{name} hangs\n{where}"
    assert done.status == 0, f"{name} ended with {done.status}\n{done.stderr}"
    assert begun == list(drawn)
    # Errors from here on belong to no single case.
    seeds.current = None
    return done.reports[-1]


def run_cases(name, seeds, *, batch=100, **options):
    """Run a function of ``cases`` for all seeds, several in each child.

    Return the sums of the counts that the children report, and in ``cases`` the number of
    cases.
    """
    sums = Counter()
    while seeds.left:
        count = min(batch, seeds.left)
        sums.update(run_batch(name, seeds, count, **options))
        sums["cases"] += count
    return sums
