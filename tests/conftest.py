"""What all tests share."""

pytest_plugins = ["skip_report"]
