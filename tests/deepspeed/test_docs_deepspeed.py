"""docs/deepspeed.md and the docstrings are right about the real DeepSpeed."""

import pytest

from docstring_examples import examples, run_example
from pages import run_page, steps_of

PAGE = "docs/deepspeed.md"


def test_the_whole_page_runs_with_deepspeed(tmp_path):
    assert len([*steps_of(PAGE, deepspeed=True)]) > len([*steps_of(PAGE)])
    done = run_page(PAGE, tmp_path, deepspeed=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tensor.swp").stat().st_size == 4 << 20


@pytest.mark.parametrize("name", examples("deepspeed"))
def test_the_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)
