"""A race finds the fastest candidate in spite of noise, or reports that it could not."""

import math
import random

import pytest

from nvmeio._cli.race import GOALS, MARGIN, Race

# How long a trial takes, by the simulated clock.
TRIAL_S = 0.1


class Disk:
    """Measures candidates of known speeds, with noise and with slow drift."""

    def __init__(self, read, write, noise, seed):
        self.read, self.write = read, write
        self.noise = noise
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.measured = []

    def measure(self, candidate):
        self.now_s += TRIAL_S
        self.measured.append(candidate)
        mood = 0.2 * math.sin(self.now_s / 10)
        return {
            op: speeds[candidate] * math.exp(mood + self.random.gauss(0, self.noise))
            for op, speeds in (("read", self.read), ("write", self.write))
        }

    def hold(self, seconds, seed=0):
        race = Race(len(self.read), seed=seed)
        race.run(self.measure, seconds, lambda: self.now_s)
        return race


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_wins_for_each_goal(noise, seed):
    # The third reads fastest, the fifth writes fastest, and the fourth is best at both.
    read, write = [1, 0.9, 1.6, 1.5, 0.7], [1, 1.05, 0.8, 1.4, 1.7]
    race = Disk(read, write, noise, seed).hold(600, seed)
    results = {goal: race.result(goal) for goal in GOALS}
    assert {goal: result.winner for goal, result in results.items()} == {
        "read": 2,
        "write": 4,
        "both": 3,
    }
    assert all(result.settled and not result.open for result in results.values())


@pytest.mark.parametrize("seed", range(10))
def test_noise_does_not_choose_among_equals(seed):
    race = Disk([1.0] * 12, [1.0] * 12, 0.1, seed).hold(40, seed)
    assert [race.result(goal).winner for goal in GOALS] == [0, 0, 0]


def test_among_equal_winners_the_cheapest_is_chosen():
    speeds = [1, 0.5, 1.5, 1.505, 1.5]
    race = Disk(speeds, speeds, 0.001, 1).hold(600)
    assert [race.result(goal).winner for goal in GOALS] == [2, 2, 2]
    assert all(race.result(goal).settled for goal in GOALS)


def test_a_candidate_that_cannot_win_is_dropped():
    speeds = [1, 0.3, 0.4, 1.02, 0.5]
    disk = Disk(speeds, speeds, 0.03, 3)
    disk.hold(600)
    runs = [disk.measured.count(one) for one in range(5)]
    assert max(runs[1], runs[2], runs[4]) < min(runs[0], runs[3])


def test_a_race_ends_when_more_trials_cannot_change_it():
    disk = Disk([1, 0.5, 0.7], [1, 0.5, 0.7], 0.01, 2)
    race = disk.hold(600)
    assert disk.now_s < 60
    assert race.trials == len(disk.measured)


def test_without_time_every_candidate_runs_once_without_a_winner():
    disk = Disk([1, 9, 2], [1, 9, 2], 0.0, 2)
    race = disk.hold(0)
    assert sorted(disk.measured) == [0, 1, 2]
    for goal in GOALS:
        assert race.result(goal).winner == 0
        assert race.result(goal).open == [1, 2]
        assert not race.result(goal).settled


def test_possible_winners_are_named_when_the_time_is_up():
    speeds = [1, 1 + 2 * MARGIN, 0.2]
    race = Disk(speeds, speeds, 0.3, 5).hold(3)
    assert race.result("read").open == [1]
    assert not race.result("read").settled


def test_the_order_changes_each_round():
    disk = Disk([1] * 6, [1] * 6, 0.3, 1)
    disk.hold(2)
    rounds = [tuple(disk.measured[begin : begin + 6]) for begin in (0, 6, 12)]
    assert all(sorted(order) == list(range(6)) for order in rounds)
    assert len(set(rounds)) == 3


def test_both_is_the_geometric_mean_of_reading_and_writing():
    race = Disk([4.0], [9.0], 0.0, 1).hold(1)
    for read, write, both in zip(*(race.speeds(0, goal) for goal in GOALS), strict=True):
        assert both == pytest.approx(math.sqrt(read * write))


def test_one_candidate_is_measured_once_and_wins():
    disk = Disk([1.0], [1.0], 0.1, 1)
    race = disk.hold(600)
    assert race.trials == 1
    assert race.result("both").winner == 0
    assert race.result("both").settled


def test_speedups_use_only_rounds_that_both_candidates_ran():
    speeds = [1, 1.5, 0.2]
    race = Disk(speeds, speeds, 0.02, 4).hold(600)
    for goal in GOALS:
        assert race.times_as_fast(1, 0, goal) == pytest.approx(1.5, rel=0.1)
        assert race.times_as_fast(0, 1, goal) * race.times_as_fast(
            1, 0, goal
        ) == pytest.approx(1)
