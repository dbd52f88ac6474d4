"""What all tests share."""

import gc
import os
import signal

import hypothesis
import pytest

pytest_plugins = [
    *("children", "control_groups", "engine_fixtures", "fuse_mounts", "mounts"),
    *("pairwise", "skip_report"),
]

# Tests are not timed: on a busy machine an example may take any time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests share the processors, so a thread that waits for its OpenMP team must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Otherwise numpy spends 0.1 s on threads for linear algebra in each of a thousand
    # children.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Background jobs of a shell ignore Ctrl-C, and their children inherit that; but tests send
# that signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Fixtures that mount or limit resources: tests that use one of them never run in parallel.
ONE_AT_A_TIME = {"control_group", "fuse_folder", "loop_devices", "slow", "tmpfs"}


# First, because pytest-xdist reads the marks; two marks would make another group.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Put tests that would disturb each other into one group, so in one process."""
    for item in items:
        grouped = item.get_closest_marker("xdist_group") is not None
        if ONE_AT_A_TIME.intersection(item.fixturenames) and not grouped:
            item.add_marker(pytest.mark.xdist_group("machine"))


def pytest_collection_finish():
    """Hide pytest's own objects for ten thousand tests from the garbage collector.

    Tests call gc.collect() to see what is freed; otherwise each call takes 0.2 s.
    """
    gc.collect()
    gc.freeze()
