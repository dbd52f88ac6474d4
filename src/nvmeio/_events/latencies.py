"""Latencies of blocks: percentiles of the library's histogram."""

import math

import numpy as np
import numpy.typing as npt

__all__ = ["Latencies"]


class Latencies:
    """A histogram of the latencies of a handle's blocks, from ``handle.latencies()``.

    A block is one I/O that the kernel sees.  Its latency is the time from its submission to
    an engine until its completion is seen, like fio's completion latency.

    Parameters
    ----------
    counts : numpy.ndarray of uint64, shape (n,)
        The number of blocks in each bucket, the fastest first.
    bounds_ns : numpy.ndarray of int64, shape (n,)
        The longest latency of each bucket, in nanoseconds, at most 3 % above its shortest.
        The last bucket has no bound: it has all blocks above 67 s.

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

    def __init__(
        self, counts: npt.NDArray[np.uint64], bounds_ns: npt.NDArray[np.int64]
    ) -> None:
        self._counts = counts
        self._bounds_ns = bounds_ns

    @property
    def counts(self) -> npt.NDArray[np.uint64]:
        """The number of blocks in each bucket, the fastest first."""
        return self._counts

    @property
    def bounds_ns(self) -> npt.NDArray[np.int64]:
        """The longest latency of each bucket, in nanoseconds."""
        return self._bounds_ns

    @property
    def count(self) -> int:
        """The number of blocks."""
        return int(self.counts.sum())

    def percentile_us(self, q: float) -> float:
        """Return the q-th percentile of the latencies.

        Parameters
        ----------
        q : float
            From 0, the fastest block, to 100, the slowest.

        Returns
        -------
        float
            In microseconds, rounded up by at most 3 %; inf above 67 s, nan if there are no
            blocks.

        Raises
        ------
        TypeError, ValueError
            ``q`` is not a number, or is out of range.
        """
        if not isinstance(q, (int, float, np.number)):
            raise TypeError(f"q is {q!r}; it must be a number from 0 to 100")
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
        """Return the latencies since an earlier snapshot of the same handle."""
        if not isinstance(earlier, Latencies):
            return NotImplemented
        if (earlier.counts > self.counts).any():
            raise ValueError(
                f"{earlier!r} has blocks that {self!r} lacks; subtract an earlier snapshot "
                "of the same handle"
            )
        return Latencies(self.counts - earlier.counts, self.bounds_ns)

    def __repr__(self) -> str:
        """Return the number of blocks and the most common percentiles."""
        shares = ", ".join(f"p{q} {self.percentile_us(q):.1f} us" for q in (50, 99, 99.9))
        return f"<nvmeio.Latencies of {self.count} blocks: {shares}>"
