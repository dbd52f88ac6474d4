"""docs/deepspeed.md says what is so of the real DeepSpeed: all of its examples run."""

from pages import examples_of, run_examples


def test_the_examples_of_the_page_run_with_those_that_need_deepspeed(tmp_path):
    examples = examples_of("deepspeed.md", deepspeed=True)
    assert len(examples) > len(examples_of("deepspeed.md"))
    done = run_examples(examples, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tensor.swp").stat().st_size == 4 << 20
