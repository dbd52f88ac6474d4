"""What all tests share."""

pytest_plugins = ["control_groups", "engine_fixtures", "mounts", "skip_report"]
