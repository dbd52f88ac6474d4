"""What the stress tests share: how long they are, and the seeds by which they are repeated.

``--length`` is ``short`` (in CI), ``full`` (`make stress`) or ``long`` (`make
stress-long`); ``@pytest.mark.amount(short=10, full=500, long=20_000)`` says what that
means to a test, which is left out where it says 0.  A test that draws random numbers
takes the fixture ``seeds``, and carries out one trial for each: everything in it is drawn
from the seed.  Where a trial fails, the report says how to repeat that trial alone:
``make replay SEED='test_name[parameter]:12345'``; where all of them fail together, how to
repeat them.  What a test counts by ``record_property`` is added up and told in the end.
"""

import math
import random
import shlex
from collections import Counter, defaultdict

import pytest

pytest_plugins = ["builds"]

# What hangs in a long run is stopped by the watchdog of its child.
TIMEOUTS_S = {"short": 300, "full": 900, "long": 0}
TARGETS = {"short": "stress-short", "full": "stress", "long": "stress-long"}
SEED_MAX = 1 << 48


def pytest_addoption(parser):
    group = parser.getgroup("nvmeio stress")
    group.addoption("--length", choices=TIMEOUTS_S, default="short")
    group.addoption("--seed", type=int, help="of the first trial of each test")
    group.addoption("--replay", metavar="TEST:SEED", help="repeat one trial of one test")


def pytest_configure(config):
    config.pluginmanager.import_plugin("places")
    if hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["seed"]
    elif config.getoption("--seed") is None:
        config.option.seed = random.randrange(SEED_MAX)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Have the processes of pytest-xdist draw from the seed that is printed."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config):
    return f"stress: --length={config.option.length} --seed={config.option.seed}"


def amount_of(item):
    """Return what a test's mark says for ``--length``."""
    mark = item.get_closest_marker("amount")
    return mark.kwargs[item.config.option.length] if mark else 1


def keep(config, items, kept):
    """Leave the other tests out."""
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_modifyitems(config, items):
    """Give tests the time they need, and leave those out of which nothing is to be done."""
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
    """The seeds of a test's trials, one after the other; `current` is the latest."""

    def __init__(self, first, count):
        self._next = first
        self.left = count
        self.current = None

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            # What goes wrong from here on is no single trial's.
            self.current = None
            raise StopIteration
        self.current = self.take(1).start
        return self.current

    def take(self, count):
        """Return the range of the next seeds, for a child that goes through them."""
        assert count <= self.left
        first = self._next
        self._next += count
        self.left -= count
        return range(first, first + count)


@pytest.fixture
def amount(request):
    """How much a test should do, by its mark and ``--length``."""
    return amount_of(request.node)


@pytest.fixture
def patience_s(pytestconfig):
    """How long a child may take at most: its watchdog tells more than a test's timeout."""
    return (TIMEOUTS_S[pytestconfig.option.length] or math.inf) - 30


@pytest.fixture
def seeds(request):
    """The seeds of as many trials as the test's amount says, or the one to be repeated."""
    replay = request.config.getoption("--replay")
    if replay is not None:
        return Seeds(int(replay.rpartition(":")[2]), 1)
    return Seeds(request.config.option.seed, request.getfixturevalue("amount"))


def how_to_repeat(item, seeds):
    """Return what repeats the trial that failed, or all of them where it was none alone."""
    options = item.config.option
    if options.replay or seeds.current is not None:
        seed = options.replay or f"{item.name}:{seeds.current}"
        return f"make replay SEED={shlex.quote(seed)}"
    words = f"--seed {options.seed} -k {item.originalname}"
    return f"make {TARGETS[options.length]} STRESS={shlex.quote(words)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Say how to repeat what failed."""
    report = yield
    seeds = getattr(item, "funcargs", {}).get("seeds")
    if report.failed and seeds is not None:
        report.sections.append(("repeat it", how_to_repeat(item, seeds)))
    return report


def pytest_terminal_summary(terminalreporter):
    """Tell what tests that passed have counted, all parameters of a test together."""
    totals = defaultdict(Counter)
    for report in terminalreporter.stats.get("passed", []):
        counts = {key: n for key, n in report.user_properties if isinstance(n, int)}
        totals[report.location[2].partition("[")[0]].update(counts)
    for name, total in totals.items():
        if total:
            terminalreporter.section(name, sep="-")
            for key, count in sorted(total.items()):
                terminalreporter.line(f"{count:15,} {key}")
