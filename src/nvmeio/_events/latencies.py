"""How long blocks took: percentiles of what the library counted."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvmeio._events.notebooks import html_table

__all__ = ["Latencies"]


@dataclass(frozen=True, eq=False, repr=False)
class Latencies:
    """How many blocks of a handle took how long; ``handle.latencies()`` makes it.

    A block is an I/O that the kernel sees, and its latency goes from when an engine was
    given it until it was seen to be finished, as fio's completion latency does.

    Parameters
    ----------
    counts : numpy.ndarray of uint64, shape (n,)
        How many blocks are in each bucket of the histogram, the fastest first.
    bounds_ns : numpy.ndarray of int64, shape (n,)
        The longest latency in each bucket, in nanoseconds: 3 % beyond its shortest, at
        most.  The last bucket has no bound: it holds what took more than 67 s.

    Examples
    --------
    >>> nvmeio.write_file(bytes(1 << 20), "data.bin")
    1048576
    >>> with nvmeio.Handle() as handle:
    ...     before = handle.latencies()
    ...     handle.read(bytearray(1 << 20), "data.bin")
    ...     interval = handle.latencies() - before
    1048576
    >>> isinstance(interval, nvmeio.Latencies)
    True
    >>> interval.percentile_us(99) > 0
    True
    """

    counts: npt.NDArray[np.uint64]
    bounds_ns: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        """How many blocks were counted."""
        return int(self.counts.sum())

    def percentile_us(self, q: float) -> float:
        """Return a latency that so many percent of the blocks did not exceed.

        Parameters
        ----------
        q : float
            From 0, which is the fastest block, to 100, which is the slowest.

        Returns
        -------
        float
            In microseconds: never too short, and too long by 3 % at most; inf above
            67 s, nan where no block was counted.

        Raises
        ------
        ValueError
            ``q`` is out of range.
        """
        if not 0 <= q <= 100:
            raise ValueError(f"q is {q}; it must be from 0 to 100")
        blocks = self.count
        if blocks == 0:
            return math.nan
        rank = max(1, math.ceil(q * blocks / 100))
        bucket = int(np.searchsorted(np.cumsum(self.counts), np.uint64(rank)))
        if bucket == len(self.counts) - 1:
            return math.inf
        return float(self.bounds_ns[bucket]) / 1000

    def __sub__(self, earlier: "Latencies") -> "Latencies":
        """Return what was counted since an earlier look at the same handle."""
        if not isinstance(earlier, Latencies):
            return NotImplemented
        if (earlier.counts > self.counts).any():
            raise ValueError(
                f"{earlier!r} has counted what {self!r} has not; it must be an earlier "
                "look at the same handle"
            )
        return Latencies(self.counts - earlier.counts, self.bounds_ns)

    def __repr__(self) -> str:
        """Return how many blocks there are, and the percentiles that are asked for most."""
        shares = ", ".join(f"p{q} {self.percentile_us(q):.1f} us" for q in (50, 99, 99.9))
        return f"<nvmeio.Latencies of {self.count} blocks: {shares}>"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        shares = {"fastest": 0, "median": 50, "90 %": 90, "99 %": 99, "99.9 %": 99.9}
        rows = {
            name: f"{self.percentile_us(q):,.1f} us"
            for name, q in (shares | {"slowest": 100}).items()
        }
        return html_table("nvmeio.Latencies", {"blocks": self.count, **rows})
