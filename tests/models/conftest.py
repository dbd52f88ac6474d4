"""What the tests against the published packages share."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Each test waits for processes that import packages of seconds."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.packaging)
            item.add_marker(pytest.mark.timeout(900))
