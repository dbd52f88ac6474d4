"""Which candidate is the fastest, where every measurement is noisy.

The candidates of a race are measured in turn, in another order each round, so that the
moods of a disk fall on all alike, and they are compared by their differences round by
round.  The first, which is the usual one, wins unless others are certainly faster: then it
is the cheapest of these that looks as fast as the fastest.  Who is certainly not faster
than the winner by more than a margin need not run again; when that is known of all, further
trials cannot change the answer by more than that.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

# Of "both" the speed is the geometric mean.
GOALS = ("read", "write", "both")

# Means that differ by less look alike.
ALIKE = 0.01
# What the winner may miss of the highest speed without that being looked into.
MARGIN = 0.03

# Nothing is certain before so many rounds, and more do not help against what then still
# swings.
ROUNDS_MIN = 4
ROUNDS_MAX = 60

# How many standard errors hold the mean of n differences in 99 of 100 cases: quantiles of
# Student's distribution with n - 1 degrees of freedom, from any table of them.
STUDENT = {4: 5.84, 5: 4.6, 6: 4.03, 7: 3.71, 8: 3.5, 10: 3.25, 15: 2.98, 20: 2.86}

Measure = Callable[[int], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Result:
    """How a race went, for one goal."""

    winner: int
    # The candidates that may be faster than the winner by more than MARGIN.
    open: list[int]
    # Whether there are none.
    settled: bool


class Race:
    """Candidates that are measured until it is known which are the fastest.

    They are known by their numbers: the usual one, and then the cheapest first.
    """

    def __init__(self, count: int, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        # For each candidate the logarithms of its speeds, by round and goal.
        self._rounds: list[dict[int, dict[str, float]]] = [{} for _ in range(count)]
        self.rounds = 0
        self.trials = 0

    def run(
        self, measure: Measure, deadline: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Measure until all is known, or the time is up, but each candidate once.

        ``measure(candidate)`` returns the speeds for "read" and "write".
        """
        while self.rounds < ROUNDS_MAX:
            runners = self._runners()
            if not runners:
                return
            self._random.shuffle(runners)
            measured = {}
            for runner in runners:
                # A round counts as a whole, or the leader would be who was measured last.
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
        """Tell whether a candidate is certainly faster than another."""
        return self._bounds(one, other, goal)[0] > ALIKE

    def rivals(self, winner: int, goal: str) -> list[int]:
        """Return the candidates that may be faster than one by more than MARGIN."""
        others = [one for one in range(len(self._rounds)) if one != winner]
        return [one for one in others if self._bounds(one, winner, goal)[1] > MARGIN]

    def speeds(self, candidate: int, goal: str) -> list[float]:
        """Return what was measured, in bytes a second, by round."""
        return [math.exp(logs[goal]) for logs in self._rounds[candidate].values()]

    def times_as_fast(self, one: int, other: int, goal: str) -> float:
        """Return a geometric mean, over the rounds that both have run."""
        return math.exp(self._mean(one, other, goal))

    def _runners(self) -> list[int]:
        """Return those of whom more has to be known, with whom they are compared."""
        if not self.rounds:
            return list(range(len(self._rounds)))
        runners: set[int] = set()
        for result in map(self.result, GOALS):
            if result.open:
                runners |= {result.winner, *result.open}
        return sorted(runners)

    def _leader(self, among: list[int], goal: str) -> int:
        """Return the fastest, which is found from one to a faster one."""
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
        """Return between what the mean of the differences certainly is."""
        differences = self._differences(one, other, goal)
        if len(differences) < ROUNDS_MIN:
            return -math.inf, math.inf
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        mean, reach = statistics.fmean(differences), _student(len(differences)) * error
        return mean - reach, mean + reach


def _student(count: int) -> float:
    """Return the quantile for so many differences, or the next larger in the table."""
    return STUDENT[max(known for known in STUDENT if known <= count)]
