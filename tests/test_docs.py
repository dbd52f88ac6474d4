"""The pages of docs/ say what is so: their examples run."""

import pytest

from pages import examples_of, run_examples


@pytest.mark.parametrize("page", ["data-loading.md", "deepspeed.md"])
def test_the_examples_of_a_page_run_one_after_the_other(page, tmp_path):
    pytest.importorskip("torch")
    examples = examples_of(page)
    assert len(examples) > 3
    done = run_examples(examples, tmp_path, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")
