"""A pytest plugin: print every skip with its reason; in CI, fail on one that is not listed.

Each line of ``tests/allowed_skips.txt`` is a regular expression, `` # `` and why skipping
for this reason is right.  ``--strict-skips`` or ``CI=true`` makes any other skip a failure.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")


def pytest_addoption(parser):
    group = parser.getgroup("nvmeio")
    group.addoption(
        "--strict-skips",
        action="store_true",
        default=os.environ.get("CI") == "true",
        help="fail if a test is skipped for a reason that is not in allowed_skips.txt",
    )
    group.addoption(
        "--allow-skip",
        action="append",
        default=[],
        metavar="REGEX",
        help="allow one more reason, for this run",
    )


def read_allowed(path):
    """Return the regular expressions of an allow-list; each line must say why."""
    patterns = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, why = line.partition(" # ")
        if not why.strip():
            raise pytest.UsageError(f"{path.name}: {line!r} does not say why")
        patterns.append(pattern.strip())
    return patterns


def skip_reasons(config):
    """Return how often each reason was given, by tests and by whole modules."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return Counter()
    reports = reporter.stats.get("skipped", [])
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def unlisted(config):
    """Return the reasons that no pattern allows."""
    patterns = [*read_allowed(ALLOWED_SKIPS), *config.getoption("--allow-skip")]
    return {
        reason
        for reason in skip_reasons(config)
        if not any(re.search(pattern, reason) for pattern in patterns)
    }


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if session.config.getoption("--strict-skips") and unlisted(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    reasons = skip_reasons(config)
    if not reasons:
        return
    bad = unlisted(config) if config.getoption("--strict-skips") else set()
    terminalreporter.section("skips")
    for reason, count in sorted(reasons.items()):
        note = "NOT LISTED in allowed_skips.txt: " if reason in bad else ""
        terminalreporter.line(f"{count:4} {note}{reason}", red=reason in bad)
