"""The examples of the pages of docs/."""

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["examples_of", "run_examples"]

DOCS = Path(__file__).resolve().parents[1] / "docs"
EXAMPLE = re.compile(r"^```python( deepspeed)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples_of(page, *, deepspeed=False):
    """Return the examples of a page, those marked to need DeepSpeed only if it is there."""
    found = EXAMPLE.findall((DOCS / page).read_text(encoding="utf-8"))
    return [code for marked, code in found if deepspeed or not marked]


def run_examples(examples, folder, *options):
    """Run examples one after the other in a process of their own."""
    return subprocess.run(
        [sys.executable, *options, "-c", "\n".join(examples)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
