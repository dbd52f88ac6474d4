"""What all tests share."""

import gc
import os
import signal

import hypothesis
import pytest

pytest_plugins = [
    *("children", "control_groups", "copies", "engine_fixtures", "fuse_mounts", "mounts"),
    *("pairwise", "skip_report"),
]

# Nothing is timed in a test: an example may take as long as a busy machine makes it take.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The processors are shared: a thread that waits for its OpenMP team must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # numpy starts threads for linear algebra in each of a thousand children, 0.1 s each.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell has what it starts in the background ignore Ctrl-C, and children inherit it: the
# tests send that signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Fixtures that mount, or bound what processes may use: tests with one of them run one after
# the other.
ONE_AT_A_TIME = {"control_group", "fuse_folder", "loop_devices", "slow", "tmpfs"}


# Before pytest-xdist reads the marks.  Two of them would be a group of its own.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keep the tests together that would disturb each other in two processes."""
    for item in items:
        grouped = item.get_closest_marker("xdist_group") is not None
        if ONE_AT_A_TIME.intersection(item.fixturenames) and not grouped:
            item.add_marker(pytest.mark.xdist_group("machine"))


def pytest_collection_finish():
    """Keep the garbage collector off what pytest holds of ten thousand tests.

    Tests call it to see what it collects, and each call would go through that: 0.2 s.
    """
    gc.collect()
    gc.freeze()
