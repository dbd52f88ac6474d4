"""Each system call of a fixed workload fails once: right bytes or an error, never a hang.

The workload opens a handle, writes, reads, gathers, scatters, syncs and closes, in C
(``fixed_workload.c``) and in Python (``trials/errnos.py``).  Runs without faults tell
which system calls it makes, and how often a thread makes each.  Then strace has one fail:
where `index` says 3, the third of that name in each thread.
"""

import re
from collections import Counter

import pytest

from builds import link_program
from children import TESTS, Child
from errnos import ERRNOS, INDEX_MAX, LEFT_OUT, every_case, may_report
from helpers import ENGINES

HANGS_AFTER_S = 10


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The fixed workload in C."""
    folder = tmp_path_factory.mktemp("fixed-workload")
    return link_program(TESTS / "stress" / "fixed_workload.c", folder)


class Workload:
    """The fixed workload, on one engine.

    Parameters
    ----------
    options : dict
        What Child wants to know to start it.
    """

    def __init__(self, **options):
        self.options = options
        self.done = set()
        runs = [self.calls_made() for _ in range(3)]
        # How often it surely makes each call: some depend on time.
        counts = {call: min(run[call] for run in runs) for call in runs[0]}
        self.counts = {call: count for call, count in counts.items() if count}

    def run(self, **options):
        """Let it run to its end, traced by strace."""
        child = Child("fixed_steps", **self.options, **options)
        child.ready()
        child.go()
        return child.finish()

    def calls_made(self):
        """Run without faults; return how often one thread makes each system call."""
        outcome = self.run(traced=["all"])
        assert set(outcome.report.values()) == {0}
        calls = Counter(re.findall(r"^(\d+) +(\w+)\(", outcome.log, re.MULTILINE))
        most = Counter()
        for (_, call), count in calls.items():
            most[call] = max(most[call], count)
        unknown = most.keys() - ERRNOS.keys() - LEFT_OUT.keys()
        assert not unknown, f"errnos.py does not say what may become of {unknown}"
        assert max(most[call] for call in most.keys() & ERRNOS.keys()) <= INDEX_MAX
        return most

    def fail(self, call, index, name):
        """Have one call fail, and look at how all has ended."""
        index %= self.counts[call]
        if (call, index, name) in self.done:
            return
        self.done.add((call, index, name))
        outcome = self.run(
            faults=[f"{call}:error={name}:when={index + 1}"], watchdog_s=HANGS_AFTER_S
        )
        words = f"{call} {index + 1} {name}: {outcome}"
        assert outcome.status == 0, words
        left_open = outcome.report.pop("left_open")
        assert left_open == (call == "close" and outcome.injected[call]), words
        failed = {-result for result in outcome.report.values() if result}
        assert failed <= may_report(call, name), words
        if not outcome.injected[call]:
            # Calls that depend on time were made less often.
            assert index > 0, words
            self.fail(call, index - 1, name)


CASES = every_case()


def fail_each(workload, seeds):
    """Carry out the case of each seed; those of calls that are never made are passed on."""
    made = [case for case in CASES if case[0] in workload.counts]
    for seed in seeds:
        workload.fail(*made[seed % len(made)])


@pytest.mark.packaging
@pytest.mark.amount(short=40, full=350, long=30_000)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_errno_of_each_call_is_survived(engine, program, tmp_path, seeds):
    env = {"NVMEIO_TEST_DIR": str(tmp_path)}
    fail_each(Workload(command=[program, engine], env=env), seeds)


@pytest.mark.amount(short=10, full=100, long=30_000)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_errno_of_each_call_is_survived_by_python(engine, tmp_path, seeds):
    arguments = {"folder": str(tmp_path), "engine": engine}
    fail_each(Workload(package="trials", **arguments), seeds)
