"""What was measured: samples of contestants at the same work, summed up and as JSON."""

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
    """What a contestant did in one turn."""

    nbytes: int
    # I/Os that the kernel saw: none for a copy.
    operations: int
    seconds: float
    # Of all threads, user and system; not a number where that is not known.
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
            # Infinite where it took longer than nvmeio can tell.
            "latency_us": {f"p{q:g}": _known(us) for q, us in self.latency_us.items()},
        }


def _known(figure: float) -> float | None:
    """Return a figure, or None for what JSON has no word for."""
    return figure if math.isfinite(figure) else None


@dataclass
class Contest:
    """A work that contestants take turns at."""

    work: str
    # What a turn moves.
    nbytes: int
    # For each contestant a turn, nvmeio's first; and what each did in every round.
    turns: dict[str, Callable[[Advance], Sample]]
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add_round(self, terminal: Terminal) -> None:
        """Give each a turn, beginning with another every time.

        Whoever cannot do it, as fio with blocks that are no sectors, is left out for good.
        """
        names = list(self.turns)
        first = len(self.samples.get(names[0], ())) % len(names)
        for name in names[first:] + names[:first]:
            try:
                # Without a speed: what the table says is by the contestants' own clocks.
                advance = terminal.progress(f"{self.work}, {name}", self.nbytes)
                self.samples.setdefault(name, []).append(self.turns[name](advance))
            except CommandError as error:
                terminal.note(f"{self.work} is without {name}: {error}")
                del self.turns[name]
                self.samples.pop(name, None)

    def figures(self, name: str, quantity: str) -> list[float]:
        """Return an attribute of a contestant's Samples, round by round."""
        return [getattr(sample, quantity) for sample in self.samples[name]]

    def latency_us(self, name: str, percentile: float) -> float | None:
        """Return the median of the rounds' percentiles, or None without I/O."""
        found = [sample.latency_us.get(percentile) for sample in self.samples[name]]
        known = [latency for latency in found if latency is not None]
        return statistics.median(known) if known else None

    def ratios(self, name: str) -> list[float]:
        """Return how many times as fast as another contestant the first was, by round."""
        ours, theirs = next(iter(self.samples.values())), self.samples[name]
        return [a.gb_per_s / b.gb_per_s for a, b in zip(ours, theirs, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        contestants = {
            name: [sample.as_dict() for sample in samples]
            for name, samples in self.samples.items()
        }
        return {"work": self.work, "contestants": contestants}
