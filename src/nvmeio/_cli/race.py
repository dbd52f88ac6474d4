"""Find the fastest candidate, although every measurement is noisy.

In each round of a race all candidates are measured, in random order, so that changes of the
drive affect all of them.  Candidates are compared by their differences within each round.
The first candidate, the default, wins unless others are certainly faster; then the winner
is the cheapest of those that look as fast as the fastest.  A candidate drops out when it is
certainly not faster than the winner by more than a margin.  When all have dropped out,
further trials cannot change the result by more than that margin.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

# The speed of "both" is the geometric mean of the other two.
GOALS = ("read", "write", "both")

# Speeds whose means differ by less than this are considered equal.
ALIKE = 0.01
# How much slower than the fastest the winner may be.
MARGIN = 0.03

# Fewer rounds make nothing certain, and more do not help against noise that remains.
ROUNDS_MIN = 4
ROUNDS_MAX = 60

# For n differences, the 99 % confidence interval of the mean in standard errors: quantiles
# of Student's t-distribution with n - 1 degrees of freedom.
STUDENT = {4: 5.84, 5: 4.6, 6: 4.03, 7: 3.71, 8: 3.5, 10: 3.25, 15: 2.98, 20: 2.86}

Measure = Callable[[int], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a race for one goal."""

    winner: int
    # The candidates that may be faster than the winner by more than MARGIN.
    open: list[int]
    # Whether `open` is empty.
    settled: bool


class Race:
    """Measures candidates until the fastest are known.

    Candidates are numbered: 0 is the default; the others follow, the cheapest first.
    """

    def __init__(self, count: int, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        # For each candidate, the logarithms of its speeds, by round and goal.
        self._rounds: list[dict[int, dict[str, float]]] = [{} for _ in range(count)]
        self.rounds = 0
        self.trials = 0

    def run(
        self, measure: Measure, deadline: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Measure until all is settled or the time is up, each candidate at least once.

        ``measure(candidate)`` returns the speeds for "read" and "write".
        """
        while self.rounds < ROUNDS_MAX:
            runners = self._runners()
            if not runners:
                return
            self._random.shuffle(runners)
            measured = {}
            for runner in runners:
                # Only complete rounds count; otherwise the last candidate measured would
                # have an advantage.
                if self.rounds > 0 and clock() > deadline:
                    return
                speeds = measure(runner)
                read, write = math.log(speeds["read"]), math.log(speeds["write"])
                measured[runner] = {
                    "read": read,
                    "write": write,
                    "both": (read + write) / 2,
                }
                self.trials += 1
            for runner, logarithms in measured.items():
                self._rounds[runner][self.rounds] = logarithms
            self.rounds += 1

    def result(self, goal: str) -> Result:
        winner = 0
        others = range(1, len(self._rounds))
        faster = [one for one in others if self.is_faster(one, 0, goal)]
        if faster:
            leader = self._leader(faster, goal)
            winner = next(one for one in faster if self._mean(one, leader, goal) > -ALIKE)
        rivals = self.rivals(winner, goal)
        return Result(winner, rivals, not rivals)

    def is_faster(self, one: int, other: int, goal: str) -> bool:
        """Return whether a candidate is certainly faster than another."""
        return self._bounds(one, other, goal)[0] > ALIKE

    def rivals(self, winner: int, goal: str) -> list[int]:
        """Return the candidates that may be faster than one by more than MARGIN."""
        others = [one for one in range(len(self._rounds)) if one != winner]
        return [one for one in others if self._bounds(one, winner, goal)[1] > MARGIN]

    def speeds(self, candidate: int, goal: str) -> list[float]:
        """Return a candidate's speed in each round, in bytes per second."""
        return [math.exp(logs[goal]) for logs in self._rounds[candidate].values()]

    def times_as_fast(self, one: int, other: int, goal: str) -> float:
        """Return the ratio of two speeds: the geometric mean over their common rounds."""
        return math.exp(self._mean(one, other, goal))

    def _runners(self) -> list[int]:
        """Return the candidates to measure again, including those to compare with."""
        if not self.rounds:
            return list(range(len(self._rounds)))
        runners: set[int] = set()
        for result in map(self.result, GOALS):
            if result.open:
                runners |= {result.winner, *result.open}
        return sorted(runners)

    def _leader(self, among: list[int], goal: str) -> int:
        """Return the fastest candidate, by pairwise comparisons."""
        leader = among[0]
        for _ in among:
            leads = [self._mean(one, leader, goal) for one in among]
            if max(leads) <= 0:
                break
            leader = among[leads.index(max(leads))]
        return leader

    def _mean(self, one: int, other: int, goal: str) -> float:
        return statistics.fmean(self._differences(one, other, goal))

    def _differences(self, one: int, other: int, goal: str) -> list[float]:
        common = self._rounds[one].keys() & self._rounds[other].keys()
        return [
            self._rounds[one][number][goal] - self._rounds[other][number][goal]
            for number in common
        ]

    def _bounds(self, one: int, other: int, goal: str) -> tuple[float, float]:
        """Return the confidence interval of the mean difference."""
        differences = self._differences(one, other, goal)
        if len(differences) < ROUNDS_MIN:
            return -math.inf, math.inf
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        mean, reach = statistics.fmean(differences), _student(len(differences)) * error
        return mean - reach, mean + reach


def _student(count: int) -> float:
    """Return the quantile for `count` differences, or the next larger one in the table."""
    return STUDENT[max(known for known in STUDENT if known <= count)]
