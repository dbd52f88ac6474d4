"""Which candidate is the fastest, where every measurement is noisy.

The candidates of a race are measured in turn, in another order each round, so that the
moods of a disk fall on all alike, and they are compared by their differences round by
round.  The first, which is the usual one, wins unless another is certainly faster: then it
is the cheapest of those that look as fast as the fastest.  Who is certainly not faster than
the winner by more than a margin need not run again; when that is known of all, further
trials cannot change the answer by more than that.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["GOALS", "MARGIN", "Race", "Result"]

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
    """How a race went, for one goal.

    Attributes
    ----------
    winner : int
        The first candidate, or if another is certainly faster the first of those that look
        as fast as the fastest.
    open : list of int
        The candidates that may be faster by more than MARGIN, by what was measured.
    settled : bool
        Whether there are none.
    """

    winner: int
    open: list[int]
    settled: bool


class Race:
    """Candidates that are measured until it is known which are the fastest.

    Parameters
    ----------
    count : int
        How many there are, known by their numbers: the usual one, and then the cheapest
        first.
    seed : int, optional
        Of the order in which candidates are measured.
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
        """Measure until all is known, or the time is up.

        Parameters
        ----------
        measure : callable
            Takes a candidate's number and returns its speeds for "read" and "write".
        deadline : float
            When to stop, by `clock`; every candidate is measured once whatever it says.
        clock : callable, default time.monotonic
            Tells the time in seconds.
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
        """Return what is known of a goal.

        Parameters
        ----------
        goal : str
            One of GOALS.

        Returns
        -------
        Result
            At any time.
        """
        every = range(len(self._rounds))
        winner = 0
        if any(self._bounds(one, 0, goal)[0] > ALIKE for one in every[1:]):
            leader = self._leader(goal)
            winner = next(one for one in every if self._mean(one, leader, goal) > -ALIKE)
        rivals = [
            one
            for one in every
            if one != winner and self._bounds(one, winner, goal)[1] > MARGIN
        ]
        return Result(winner, rivals, not rivals)

    def speeds(self, candidate: int, goal: str) -> list[float]:
        """Return what was measured.

        Parameters
        ----------
        candidate : int
            Its number.
        goal : str
            One of GOALS.

        Returns
        -------
        list of float
            In the order of the rounds.
        """
        return [math.exp(logs[goal]) for logs in self._rounds[candidate].values()]

    def times_as_fast(self, one: int, other: int, goal: str) -> float:
        """Return how many times as fast as another a candidate is.

        Parameters
        ----------
        one, other : int
            Their numbers.
        goal : str
            One of GOALS.

        Returns
        -------
        float
            The geometric mean over the rounds that both have run.
        """
        return math.exp(self._mean(one, other, goal))

    def _runners(self) -> list[int]:
        """Return those of whom more has to be known, with whom they are compared."""
        runners: set[int] = set()
        for goal in GOALS if self.rounds else ():
            result = self.result(goal)
            if result.open:
                runners |= {result.winner, *result.open}
        return sorted(runners) if self.rounds else list(range(len(self._rounds)))

    def _leader(self, goal: str) -> int:
        """Return the fastest, which is found from one to a faster one."""
        leader = 0
        for _ in self._rounds:
            leads = [self._mean(one, leader, goal) for one in range(len(self._rounds))]
            if max(leads) <= 0:
                break
            leader = leads.index(max(leads))
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
