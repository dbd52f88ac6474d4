"""Faults that hold for a while, and what they may and must do to a transfer."""

import errno

from filemodel.plans import PASSING
from helpers import PAGE


class Regime:
    """The faults of one call of the FUSE file system, as faultyfs.py says.

    `met` is set when something has ended that had to meet them.
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
        """Tell whether these bytes of the file, transferred alone, meet the fault."""
        if self.kind == "short" and end - begin < 3 * PAGE:
            return False
        return self._hits(call, begin, end)

    def may_fail(self, call, begin, end):
        """Tell whether they may fail: reads take whole pages round what is wanted."""
        if call == "read" and begin < end:
            begin, end = begin - begin % PAGE, end + -end % PAGE
        return not self.passes and self._hits(call, begin, end)

    def must_fail(self, call, begin, end):
        """Tell whether they must: the fault does not pass, nor end before they do."""
        lasts = not self.passes and "times" not in self.fault
        return lasts and self._hits(call, begin, end)


class Injected:
    """Errors of a library that is built with faults: they may strike anywhere."""

    def __init__(self, error):
        self.error = error

    def may_fail(self, call, begin, end):
        """Tell that anything may fail that does anything."""
        return begin < end or call == "fsync"

    def must_fail(self, call, begin, end):
        """Tell that nothing has to."""
        return False
