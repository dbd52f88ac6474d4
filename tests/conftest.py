"""What all tests share."""

pytest_plugins = [
    *("control_groups", "copies", "engine_fixtures", "fuse_mounts", "mounts"),
    "skip_report",
]
