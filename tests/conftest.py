"""What all tests share."""

import hypothesis

pytest_plugins = [
    *("children", "control_groups", "copies", "engine_fixtures", "fuse_mounts", "mounts"),
    "skip_report",
]

# Nothing is timed in a test: an example may take as long as a busy machine makes it take.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
