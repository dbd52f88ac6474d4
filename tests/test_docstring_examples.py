"""Every public name has an example, which runs."""

import pytest

from docstring_examples import examples, run_example


@pytest.mark.parametrize("name", examples())
def test_the_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)
