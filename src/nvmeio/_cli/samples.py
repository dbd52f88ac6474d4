"""Measurements: samples of contenders at the same work, their statistics, and JSON."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvmeio._cli.arguments import CommandError
from nvmeio._cli.terminal import Advance, Terminal

GIB = 1 << 30

PERCENTILES = (50.0, 99.0, 99.9)


@dataclass(frozen=True)
class Sample:
    """The measurement of one turn of a contender."""

    nbytes: int
    # I/Os that the kernel saw; 0 for a copy.
    operations: int
    seconds: float
    # Of all threads, user and system; nan if unknown.
    cpu_seconds: float
    # For each of PERCENTILES; empty without I/O.
    latency_us: dict[float, float]

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def iops(self) -> float:
        return self.operations / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_seconds / (self.nbytes / GIB)

    def as_dict(self) -> dict[str, Any]:
        return {
            "bytes": self.nbytes,
            "operations": self.operations,
            "seconds": self.seconds,
            "cpu_seconds": _known(self.cpu_seconds),
            "gb_per_s": self.gb_per_s,
            "iops": self.iops,
            "cpu_s_per_gib": _known(self.cpu_s_per_gib),
            # Infinite if it exceeds the largest latency that nvmeio records.
            "latency_us": {f"p{q:g}": _known(us) for q, us in self.latency_us.items()},
        }


def _known(figure: float) -> float | None:
    """Return a figure; None for infinity and nan, which JSON cannot represent."""
    return figure if math.isfinite(figure) else None


@dataclass
class Contest:
    """A work at which contenders take turns."""

    work: str
    # The bytes of a turn.
    nbytes: int
    # The function of each contender's turn, nvmeio's first; and the samples of all rounds.
    turns: dict[str, Callable[[Advance], Sample]]
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add_round(self, terminal: Terminal) -> None:
        """Run each contender once, beginning with another one each round.

        A contender that cannot do the work drops out: fio, for example, if blocks are not
        multiples of a sector.
        """
        names = list(self.turns)
        first = len(self.samples.get(names[0], ())) % len(names)
        for name in names[first:] + names[:first]:
            try:
                # Show no speed, because the table has the contenders' own times.
                advance = terminal.progress(f"{self.work}, {name}", self.nbytes)
                self.samples.setdefault(name, []).append(self.turns[name](advance))
            except CommandError as error:
                terminal.note(f"{self.work}: {name} is left out: {error}")
                del self.turns[name]
                self.samples.pop(name, None)

    def figures(self, name: str, quantity: str) -> list[float]:
        """Return an attribute of a contender's samples, for each round."""
        return [getattr(sample, quantity) for sample in self.samples[name]]

    def latency_us(self, name: str, percentile: float) -> float | None:
        """Return the median of the rounds' percentiles, or None without I/O."""
        found = [sample.latency_us.get(percentile) for sample in self.samples[name]]
        known = [latency for latency in found if latency is not None]
        return statistics.median(known) if known else None

    def ratios(self, name: str) -> list[float]:
        """Return the speed of the first contender relative to another, for each round."""
        ours, theirs = next(iter(self.samples.values())), self.samples[name]
        return [a.gb_per_s / b.gb_per_s for a, b in zip(ours, theirs, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        contenders = {
            name: [sample.as_dict() for sample in samples]
            for name, samples in self.samples.items()
        }
        return {"work": self.work, "contestants": contenders}
