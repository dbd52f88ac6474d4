"""The examples in docstrings of public names and of their members run."""

import pytest

from docstring_examples import examples, run_example


@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)
