"""What was measured: samples of contestants at the same work, summed up and as JSON."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

from nvmeio.cli.arguments import CommandError
from nvmeio.cli.terminal import Advance, Terminal

__all__ = ["GIB", "PERCENTILES", "Contest", "Sample"]

GIB = 1 << 30

PERCENTILES = (50.0, 99.0, 99.9)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a contestant did in one turn.

    Attributes
    ----------
    nbytes, operations : int
        What was moved, and in how many I/Os that the kernel saw: none for a copy.
    seconds, cpu_seconds : float
        How long it took, and the CPU time of all threads, user and system; the latter is
        not a number where that is not known.
    latency_us : dict of float to float
        For each of PERCENTILES in how many microseconds such a part of the I/Os was
        complete; empty without I/O.
    """

    nbytes: int
    operations: int
    seconds: float
    cpu_seconds: float
    latency_us: dict[float, float]

    @property
    def gb_per_s(self) -> float:
        """Throughput in 10^9 bytes a second."""
        return self.nbytes / self.seconds / 1e9

    @property
    def iops(self) -> float:
        """I/Os a second."""
        return self.operations / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        """CPU time in seconds for each GiB."""
        return self.cpu_seconds / (self.nbytes / GIB)


Turn = Callable[[Advance], Sample]


@dataclasses.dataclass
class Contest:
    """A work that contestants take turns at.

    Attributes
    ----------
    work : str
        What they do.
    nbytes : int
        How much, in a turn.
    turns : dict of str to callable
        For each contestant a turn, nvmeio's first.
    samples : dict of str to list of Sample
        What each did in every round.
    """

    work: str
    nbytes: int
    turns: dict[str, Turn]
    samples: dict[str, list[Sample]] = dataclasses.field(default_factory=dict)

    def fight(self, terminal: Terminal) -> None:
        """Add a round: a turn of each, begun by another every time.

        Whoever cannot do it, as fio with blocks that are no sectors, is left out for good.

        Parameters
        ----------
        terminal : Terminal
            Shows the progress.
        """
        names = list(self.turns)
        first = len(self.samples.get(names[0], ())) % len(names)
        for name in names[first:] + names[:first]:
            try:
                with terminal.progress(f"{self.work}, {name}", self.nbytes) as advance:
                    sample = self.turns[name](advance)
            except CommandError as error:
                terminal.note(f"{self.work} is without {name}: {error}")
                del self.turns[name]
                self.samples.pop(name, None)
                continue
            self.samples.setdefault(name, []).append(sample)

    def figures(self, name: str, quantity: str) -> list[float]:
        """Return a quantity of each round.

        Parameters
        ----------
        name : str
            A contestant.
        quantity : str
            An attribute of Sample.

        Returns
        -------
        list of float
            In the order of the rounds.
        """
        return [getattr(sample, quantity) for sample in self.samples[name]]

    def latency_us(self, name: str, percentile: float) -> float | None:
        """Return a latency: the median of those of the rounds.

        Parameters
        ----------
        name : str
            A contestant.
        percentile : float
            One of PERCENTILES.

        Returns
        -------
        float or None
            In microseconds; None without I/O.
        """
        found = [sample.latency_us.get(percentile) for sample in self.samples[name]]
        known = [latency for latency in found if latency is not None]
        return statistics.median(known) if known else None

    def ratios(self, name: str) -> list[float]:
        """Return how many times as fast as another contestant the first was.

        Parameters
        ----------
        name : str
            The other one.

        Returns
        -------
        list of float
            Of each round, for the speed of a disk drifts.
        """
        ours, theirs = next(iter(self.samples.values())), self.samples[name]
        return [a.gb_per_s / b.gb_per_s for a, b in zip(ours, theirs, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON has them.

        Returns
        -------
        dict
            With the work and, for each contestant, every round.
        """
        return {
            "work": self.work,
            "contestants": {
                name: [_as_dict(sample) for sample in samples]
                for name, samples in self.samples.items()
            },
        }


def _known(figure: float) -> float | None:
    """Return a figure, or None for what JSON has no word for."""
    return figure if math.isfinite(figure) else None


def _as_dict(sample: Sample) -> dict[str, Any]:
    latencies = {
        # Infinite where it took longer than nvmeio can tell.
        f"p{percentile:g}": _known(us)
        for percentile, us in sample.latency_us.items()
    }
    return {
        "bytes": sample.nbytes,
        "operations": sample.operations,
        "seconds": sample.seconds,
        "cpu_seconds": _known(sample.cpu_seconds),
        "gb_per_s": sample.gb_per_s,
        "iops": sample.iops,
        "cpu_s_per_gib": _known(sample.cpu_s_per_gib),
        "latency_us": latencies,
    }
