"""What all tests share."""

import signal

import hypothesis

pytest_plugins = [
    *("children", "control_groups", "copies", "engine_fixtures", "fuse_mounts", "mounts"),
    "skip_report",
]

# Nothing is timed in a test: an example may take as long as a busy machine makes it take.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A shell has what it starts in the background ignore Ctrl-C, and children inherit it: the
# tests send that signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
