"""The pages of docs/ say what is so: their examples run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["data-loading.md"])
def test_the_examples_of_a_page_run_one_after_the_other(page, tmp_path):
    pytest.importorskip("torch")
    examples = EXAMPLE.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(examples) > 5
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(examples)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
