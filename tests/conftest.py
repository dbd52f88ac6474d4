"""What all tests share."""

pytest_plugins = ["control_groups", "copies", "engine_fixtures", "mounts", "skip_report"]
