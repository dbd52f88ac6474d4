"""What all tests share."""

pytest_plugins = ["engine_fixtures", "mounts", "skip_report"]
