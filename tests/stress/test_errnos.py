"""Fail each system call of a fixed workload once: expect right bytes or an error.

The workload opens a handle, writes, reads, gathers, scatters, syncs and closes, in C
(``fixed_workload.c``) and in Python (``cases/errnos.py``).  Other workloads save
checkpoints or drain a folder; the old or the new one must be whole afterwards.  A seed
selects a case of ``errnos.py``: a call, an index and an errno.  With index 3, strace fails
the third call of that name in each thread.  Runs without faults count the calls of each
thread; cases of calls that are never made are left out, unless a seed is repeated.
"""

import os
import re
import shutil
from collections import Counter, defaultdict

import pytest

from builds import link_program
from cases.errnos import STATE_BYTES, STEPS_BEFORE, drained_files
from children import TESTS, Child, need_strace, skip_sanitized
from errnos import CHECKPOINTS, DRAINS, TRANSFERS
from helpers import ENGINES
from nvmeio.checkpoint import Checkpointer
from workloads.checkpoints import same, state_of

HANGS_AFTER_S = 60
MEASURED_RUNS = 3
# Attempts at a case whose call was not made that often; some calls depend on timing.
TRIES = 5


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The fixed workload in C."""
    folder = tmp_path_factory.mktemp("fixed-workload")
    return link_program(TESTS / "stress" / "fixed_workload.c", folder)


def calls_in(log):
    """Return the most calls of each name that one thread made, from a log of strace."""
    most = Counter()
    calls = Counter(re.findall(r"^(\d+) +(\w+)\(", log, re.MULTILINE))
    for (_, call), count in calls.items():
        most[call] = max(most[call], count)
    return most


def paths_in(log, call, index):
    """Return the file of the call with this index in each thread that made so many."""
    paths = defaultdict(list)
    for thread, path in re.findall(rf"^(\d+) +{call}\(\d+<(.*?)>", log, re.MULTILINE):
        paths[thread].append(path)
    return [made[index] for made in paths.values() if len(made) > index]


class Workload:
    """The fixed workload, on one engine.

    Parameters
    ----------
    options : dict
        Arguments of Child.
    """

    name, calls = "fixed_steps", TRANSFERS

    def __init__(self, **options):
        self.options = options

    def run(self, **options):
        """Run it under strace until it ends."""
        child = Child(self.name, **self.options, **options)
        child.ready()
        child.go()
        return child.finish()

    def calls_made(self):
        """Run without faults; return the most calls of each name that one thread makes."""
        outcome = self.run(traced=["all"])
        assert set(outcome.report.values()) == {0}
        most = calls_in(outcome.log)
        calls = self.calls
        unknown = most.keys() - calls.errnos.keys() - calls.left_out.keys()
        assert not unknown, f"errnos.py does not say what may become of {unknown}"
        often = max(most[call] for call in most.keys() & calls.errnos.keys())
        assert often <= calls.index_max
        return most

    def surely_made(self):
        """Return the cases whose calls were made often enough in every run."""
        runs = [self.calls_made() for _ in range(MEASURED_RUNS)]
        cases = self.calls.every_case()
        return {case for case in cases if all(case[1] < run[case[0]] for run in runs)}

    def fail(self, call, index, name):
        """Fail one call, and check the outcome; return whether the call was made."""
        outcome = self.run(
            faults=[f"{call}:error={name}:when={index + 1}"], watchdog_s=HANGS_AFTER_S
        )
        words = f"{call} {index + 1} {name}: {outcome}"
        assert outcome.status == 0, words
        left_open = outcome.report.pop("left_open")
        # strace suppressed this close, so the descriptor stays open.
        unclosed = outcome.injected["close"]
        assert left_open == unclosed or (left_open < unclosed and not self.calls.strict), (
            words
        )
        failed = {-result for result in outcome.report.values() if result}
        may_report = self.calls.may_report(call, name)
        assert failed <= may_report, words
        must_report = call in self.calls.must_be_reported and may_report
        if outcome.injected[call] and must_report and not failed:
            paths = paths_in(outcome.log, call, index)
            assert paths, words
            assert all(map(self.is_substituted, paths)), words
        if not outcome.injected[call]:
            assert calls_in(outcome.log)[call] <= index, words
        self.look(outcome.report, words)
        return outcome.injected[call] > 0

    def is_substituted(self, path):
        """Return whether another file replaces this one, so that no error need show."""
        return False

    def look(self, results, words):
        """Check what the workload has left."""


class Checkpoints(Workload):
    """The workload that saves checkpoints in a folder.

    Parameters
    ----------
    root : pathlib.Path
        The folder.
    options : dict
        Arguments of Child.
    """

    name, calls = "checkpoint_steps", CHECKPOINTS

    def __init__(self, root, **options):
        super().__init__(package="cases", root=str(root), **options)
        self.root = root

    def run(self, **options):
        """Run it, starting without checkpoints."""
        shutil.rmtree(self.root, ignore_errors=True)
        return super().run(**options)

    def look(self, results, words):
        """Check that every step reported as saved exists, and that all steps are right."""
        saved = [
            int(what.removeprefix("save "))
            for what, result in results.items()
            if what.startswith("save ") and not result
        ]
        checkpointer = Checkpointer(self.root, keep=None)
        newest = checkpointer.latest()
        assert newest >= max(saved, default=STEPS_BEFORE), words
        for step in checkpointer.steps():
            checkpointer.verify(step)
            assert same(checkpointer.restore(step), state_of(step, STATE_BYTES)), words
        checkpointer.cleanup()
        kept = {f"step-{step}" for step in checkpointer.steps()}
        own = {".nvmeio-lock", ".nvmeio-latest"}
        assert set(os.listdir(self.root)) - own == kept, words


class Drains(Checkpoints):
    """The workload that drains a folder."""

    name, calls = "drain_steps", DRAINS

    def is_substituted(self, path):
        # An old copy is synced and compared with the new contents, which replace it.
        return path in {str(self.root / "target" / name) for name in drained_files(1)}

    def look(self, results, words):
        """Check that a copy with a manifest is complete, and that reported copies exist."""
        target = self.root / "target"
        found = {path.name: path.read_bytes() for path in target.iterdir()}
        left = [name for name in found if name.endswith("-part")]
        assert not left or results["drained"], words
        if ".metadata" in found:
            number = int(found[".metadata"])
            assert {n: found[n] for n in found if n not in left} == drained_files(number)
        if not results.get("drained", 1):
            assert found == drained_files(2), words


# One seed for each case: each errno of each call at each index.
ALL = len(TRANSFERS.every_case())
ALL_OF_CHECKPOINTS = len(CHECKPOINTS.every_case())


@pytest.fixture
def fail_each(seeds, amount, pytestconfig, record_property):
    """A function that runs the case of each seed on a workload."""
    need_strace()
    skip_sanitized("make system calls of their own")
    repeated = pytestconfig.getoption("--replay") is not None

    def fail_each(workload):
        cases = workload.calls.every_case()
        made = set(cases) if repeated else workload.surely_made()
        fired, missed = set(), set()

        def carry_out(case):
            hit = any(workload.fail(*case) for _ in range(TRIES))
            (fired if hit else missed).add(case)

        for seed in seeds:
            if cases[seed % len(cases)] in made:
                carry_out(cases[seed % len(cases)])
        if not fired | missed:
            # The few cases of a short run may all be of calls that this workload never
            # makes.
            carry_out(min(made))
        record_property("calls that failed", len(fired))
        record_property("calls that were not made so often this time", len(missed))
        for call, count in Counter(call for call, _, _ in fired).items():
            record_property(f"of them {call}", count)
        assert len(fired) > 3 * len(missed), f"they were not made so often: {missed}"
        if amount == len(cases) and not repeated:
            assert fired | missed == made
            assert {(call, name) for call, _, name in fired} == {
                (call, name) for call, _, name in made
            }

    return fail_each


@pytest.mark.amount(short=ALL // 30, full=ALL // 8, long=ALL)
@pytest.mark.parametrize("engine", ENGINES)
def test_c_survives_each_errno_of_each_call(engine, fail_each, program, tmp_path):
    env = {"NVMEIO_TEST_DIR": str(tmp_path)}
    fail_each(Workload(command=[program, engine], env=env))


@pytest.mark.amount(short=ALL // 240, full=ALL // 60, long=ALL)
@pytest.mark.parametrize("engine", ENGINES)
def test_python_survives_each_errno_of_each_call(engine, fail_each, tmp_path):
    arguments = {"folder": str(tmp_path), "engine": engine}
    fail_each(Workload(package="cases", **arguments))


@pytest.mark.amount(
    short=ALL_OF_CHECKPOINTS // 240, full=ALL_OF_CHECKPOINTS // 60, long=ALL_OF_CHECKPOINTS
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_is_whole_after_each_errno_of_each_call(engine, fail_each, tmp_path):
    fail_each(Checkpoints(tmp_path / "root", env={"NVMEIO_ENGINE": engine}))


@pytest.mark.amount(
    short=ALL_OF_CHECKPOINTS // 480, full=ALL_OF_CHECKPOINTS // 60, long=ALL_OF_CHECKPOINTS
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_drain_is_whole_after_each_errno_of_each_call(engine, fail_each, tmp_path):
    fail_each(Drains(tmp_path / "root", env={"NVMEIO_ENGINE": engine}))
