"""Faults that last for a while, and how they may and must affect transfers."""

import errno

from filemodel.plans import PASSING
from helpers import PAGE


class Regime:
    """The faults of one call of the FUSE file system (faultyfs.py).

    `met` becomes true when a transfer has ended that these faults had to strike.
    """

    def __init__(self, faults):
        ((self.call, self.fault),) = faults.items()
        (self.kind,) = self.fault.keys() & {"error", "full_at", "short", "delay_s"}
        self.error = errno.ENOSPC if self.kind == "full_at" else self.fault.get("error")
        self.passes = self.error in (None, *PASSING)
        self.met = False

    def _hits(self, call, begin, end):
        if call != self.call or (begin == end and call != "fsync"):
            return False
        if self.kind == "full_at":
            return end > self.fault["full_at"]
        return begin <= self.fault.get("at", begin) < max(end, begin + 1)

    def meets(self, call, begin, end):
        """Return whether a transfer of these bytes alone meets the fault."""
        if self.kind == "short" and end - begin < 3 * PAGE:
            return False
        return self._hits(call, begin, end)

    def may_fail(self, call, begin, end):
        """Return whether the call may fail; reads take all pages round their bytes."""
        if call == "read" and begin < end:
            begin, end = begin - begin % PAGE, end + -end % PAGE
        return not self.passes and self._hits(call, begin, end)

    def must_fail(self, call, begin, end):
        """Return whether the call must fail: the fault lasts, and outlives the call."""
        lasts = not self.passes and "times" not in self.fault
        return lasts and self._hits(call, begin, end)


class Injected:
    """Errors of the library's test build, which may strike anywhere."""

    def __init__(self, error):
        self.error = error

    def may_fail(self, call, begin, end):
        """Return true for every call that moves bytes."""
        return begin < end or call == "fsync"

    def must_fail(self, call, begin, end):
        """Return false: nothing has to fail."""
        return False
