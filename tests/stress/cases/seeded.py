"""Run cases one after the other, each with its own random numbers, perhaps under faults."""

import contextlib
import errno
import random

from workloads.common import report

# The injected errors that a caller may see.
EXPECTED = (errno.EIO, errno.ENOSPC)


def each_case(first, count):
    """Yield the random numbers of each case; report each seed to the parent.

    The arguments are the first seed and the count, because a list of thousands is too long
    for a command line.
    """
    for seed in range(first, first + count):
        report({"seed": seed})
        yield random.Random(seed)


@contextlib.contextmanager
def may_fail(what, folder, counts):
    """Count a success or failure; an error must be an injected one, and name a file."""
    try:
        yield
    except OSError as error:
        if error.errno not in EXPECTED or not str(error.filename).startswith(str(folder)):
            raise
        counts[f"{what}, failed"] += 1
    else:
        counts[what] += 1
