"""Compare candidates, although every measurement is noisy: docs/tuning.md explains how.

In each round all candidates are measured, in random order, so that changes of the drive
affect all of them.  Candidates are compared by their differences within each round.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvmeio._cli.trials import Options

# The speed of "both" is the geometric mean of the other two.
GOALS = ("read", "write", "both")

# Fewer rounds make nothing certain; with more, other noise than that of a round remains.
ROUNDS_MIN = 6
ROUNDS_MAX = 20

# A difference is certain if the mean minus this many standard errors is above ALIKE: 99 %
# of Student's t-distribution with 5 degrees of freedom, and more with more rounds.
ERRORS = 4.03
# Speeds whose means differ by less than this are considered equal.
ALIKE = 0.01

Measure = Callable[[Options], Mapping[str, float]]


@dataclasses.dataclass
class Comparison:
    """Candidates, and their speeds."""

    name: str
    candidates: Sequence[Options]
    # For each round and candidate, the bytes per second of "read" and "write".
    rounds: list[list[Mapping[str, float]]] = dataclasses.field(default_factory=list)
    chance: random.Random = dataclasses.field(default_factory=random.Random)

    def run(
        self, measure: Measure, deadline: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Measure until the time is up, each candidate at least once."""
        order = list(range(len(self.candidates)))
        while len(self.rounds) < ROUNDS_MAX and (not self.rounds or clock() < deadline):
            self.chance.shuffle(order)
            measured: dict[int, Mapping[str, float]] = {}
            for index in order:
                # Only complete rounds count.
                if self.rounds and clock() > deadline:
                    return
                measured[index] = measure(self.candidates[index])
            self.rounds.append([measured[index] for index in sorted(measured)])

    def speeds(self, candidate: Options, goal: str) -> list[float]:
        """Return a candidate's speed in each round, in bytes per second."""
        index = self.candidates.index(candidate)
        if goal == "both":
            return [
                math.sqrt(one[index]["read"] * one[index]["write"]) for one in self.rounds
            ]
        return [one[index][goal] for one in self.rounds]

    def times_as_fast(self, one: Options, other: Options, goal: str) -> float:
        """Return the ratio of two speeds: the geometric mean over all rounds."""
        return math.exp(statistics.fmean(self._differences(one, other, goal)))

    def is_faster(self, one: Options, other: Options, goal: str) -> bool:
        """Return whether a candidate is certainly faster than another."""
        found = self._differences(one, other, goal)
        if len(found) < ROUNDS_MIN:
            return False
        error = statistics.stdev(found) / math.sqrt(len(found))
        return statistics.fmean(found) - ERRORS * error > ALIKE

    def best(self, goal: str, so_far: Options) -> Options:
        """Return the best candidate: `so_far`, unless others are certainly faster.

        Of these, it is the first one that is as fast as the fastest.
        """
        faster = [one for one in self.candidates if self.is_faster(one, so_far, goal)]
        leads = [self.times_as_fast(one, so_far, goal) for one in faster]
        fast = (
            one
            for one, lead in zip(faster, leads, strict=True)
            if lead * (1 + ALIKE) >= max(leads)
        )
        return next(fast, so_far)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rounds": len(self.rounds),
            "candidates": [
                {
                    "options": candidate,
                    "read_bytes_per_s": self.speeds(candidate, "read"),
                    "write_bytes_per_s": self.speeds(candidate, "write"),
                }
                for candidate in self.candidates
            ],
        }

    def _differences(self, one: Options, other: Options, goal: str) -> list[float]:
        """Return the differences of the speeds' logarithms in each round."""
        pairs = zip(self.speeds(one, goal), self.speeds(other, goal), strict=True)
        return [math.log(first / second) for first, second in pairs]
