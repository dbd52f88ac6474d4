"""What all tests share."""

pytest_plugins = [
    *("children", "control_groups", "copies", "engine_fixtures", "fuse_mounts", "mounts"),
    "skip_report",
]
