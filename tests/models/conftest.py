"""Shared by the tests against the published packages."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Give each test more time: its processes import packages for seconds."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.packaging)
            item.add_marker(pytest.mark.timeout(900))
