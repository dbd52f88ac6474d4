"""docs/deepspeed.md says what is so of the real DeepSpeed too: all of its examples run."""

import pytest

from pages import examples_of, run_examples

# With a point, for this folder itself could be taken for the package.
pytest.importorskip("deepspeed.ops", reason="deepspeed is not installed")


def test_the_examples_of_the_page_run_with_those_that_need_deepspeed(tmp_path):
    examples = examples_of("deepspeed.md", deepspeed=True)
    assert len(examples) > len(examples_of("deepspeed.md"))
    done = run_examples(examples, tmp_path)
    assert done.returncode == 0, done.stderr
    swapped = (tmp_path / "tensor.swp").stat().st_size
    assert swapped == 4 << 20
