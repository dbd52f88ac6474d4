"""Shared by the stress tests: their length, and the seeds that repeat them.

``--length`` is ``short`` (in CI), ``full`` (`make stress`) or ``long`` (`make
stress-long`).  ``@pytest.mark.amount(short=10, full=500, long=20_000)`` sets a test's
amount for each length; 0 leaves the test out.  A test that draws random numbers uses the
fixture ``seeds`` and runs one case for each seed; everything in a case is drawn from its
seed. If a case fails, the report says how to repeat that case alone: ``make replay
SEED='test_name[parameter]:12345'``.  If no single case is to blame, it says how to repeat
all.  Counts by ``record_property`` are added up and printed at the end.
"""

import math
import random
import shlex
from collections import Counter, defaultdict

import pytest

pytest_plugins = ["builds"]

# In a long run the watchdogs of the children stop what hangs.
TIMEOUTS_S = {"short": 300, "full": 900, "long": 0}
TARGETS = {"short": "stress-short", "full": "stress", "long": "stress-long"}
SEED_MAX = 1 << 48


def pytest_addoption(parser):
    group = parser.getgroup("nvmeio stress")
    group.addoption("--length", choices=TIMEOUTS_S, default="short")
    group.addoption("--seed", type=int, help="of the first case of each test")
    group.addoption("--replay", metavar="TEST:SEED", help="repeat one case of one test")


def pytest_configure(config):
    config.pluginmanager.import_plugin("places")
    if hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["seed"]
    elif config.getoption("--seed") is None:
        config.option.seed = random.randrange(SEED_MAX)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give the processes of pytest-xdist the seed that is printed."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config):
    return f"stress: --length={config.option.length} --seed={config.option.seed}"


def amount_of(item):
    """Return the amount of a test's mark for ``--length``."""
    mark = item.get_closest_marker("amount")
    return mark.kwargs[item.config.option.length] if mark else 1


def keep(config, items, kept):
    """Deselect all other tests."""
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_modifyitems(config, items):
    """Set the timeouts of tests, and deselect those whose amount is 0."""
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUTS_S[config.option.length]))
    replay = config.getoption("--replay")
    if replay is None:
        keep(config, items, [item for item in items if amount_of(item) > 0])
        return
    name, _, seed = replay.rpartition(":")
    if not seed.isdecimal():
        raise pytest.UsageError(
            f"--replay wants test_name[parameter]:12345, not {replay!r}"
        )
    kept = [item for item in items if item.name == name]
    if len(kept) != 1:
        raise pytest.UsageError(f"--replay: there are {len(kept)} tests {name!r}")
    keep(config, items, kept)


class Seeds:
    """Iterates over the seeds of a test's cases; `current` is the latest."""

    def __init__(self, first, count):
        self._next = first
        self.left = count
        self.current = None

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            # Errors from here on belong to no single case.
            self.current = None
            raise StopIteration
        self.current = self.take(1).start
        return self.current

    def take(self, count):
        """Return a range of the next seeds, for one child."""
        assert count <= self.left
        first = self._next
        self._next += count
        self.left -= count
        return range(first, first + count)


@pytest.fixture
def amount(request):
    """The amount of a test, by its mark and ``--length``."""
    return amount_of(request.node)


@pytest.fixture
def patience_s(pytestconfig):
    """The limit of a child's watchdog, which reports more than a test's timeout does."""
    return (TIMEOUTS_S[pytestconfig.option.length] or math.inf) - 30


@pytest.fixture
def seeds(request):
    """As many seeds as the test's amount, or only the one to repeat."""
    replay = request.config.getoption("--replay")
    if replay is not None:
        return Seeds(int(replay.rpartition(":")[2]), 1)
    return Seeds(request.config.option.seed, request.getfixturevalue("amount"))


def how_to_repeat(item, seeds):
    """Return the option that repeats the failed case, or all if no single one failed."""
    options = item.config.option
    if options.replay or seeds.current is not None:
        seed = options.replay or f"{item.name}:{seeds.current}"
        return f"make replay SEED={shlex.quote(seed)}"
    words = f"--seed {options.seed} -k {item.originalname}"
    return f"make {TARGETS[options.length]} STRESS={shlex.quote(words)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add to a failure's report how to repeat it."""
    report = yield
    seeds = getattr(item, "funcargs", {}).get("seeds")
    if report.failed and seeds is not None:
        report.sections.append(("repeat it", how_to_repeat(item, seeds)))
    return report


def pytest_terminal_summary(terminalreporter):
    """Print the counts of tests that passed, summed over a test's parameters."""
    totals = defaultdict(Counter)
    for report in terminalreporter.stats.get("passed", []):
        counts = {key: n for key, n in report.user_properties if isinstance(n, int)}
        totals[report.location[2].partition("[")[0]].update(counts)
    for name, total in totals.items():
        if total:
            terminalreporter.section(name, sep="-")
            for key, count in sorted(total.items()):
                terminalreporter.line(f"{count:15,} {key}")
