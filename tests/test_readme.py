"""The examples, links and names of the README are right."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language):
    """Return the code blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_readmes_examples_are_short_and_run(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    first, many, *_ = code_blocks("python")
    assert len([line for line in first.splitlines() if line]) == 6
    shown = []
    for example in (first, many):
        run = subprocess.run(
            [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        shown += run.stdout.splitlines()
    assert shown == [
        "equal: True",
        "32000096 bytes written",
        "32000096 bytes read",
        "equal: True",
    ]
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.bin")}
    assert sizes == {f"{i}.bin": 1_000_003 * 4 for i in range(8)}


def test_the_readmes_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert {"docs/design.md", "CONTRIBUTING.md", "bench/README.md"} <= set(targets)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_name_of_nvmeio_in_the_readme_exists():
    pytest.importorskip("torch", reason="torch is not installed")
    names = set(re.findall(r"\bnvmeio((?:\.[A-Za-z]\w*)+)", README))
    assert {".Handle", ".checkpoint.Checkpointer", ".torch.ArrayDataset"} <= names
    missing = []
    for name in names:
        try:
            pkgutil.resolve_name(f"nvmeio{name}")
        except AttributeError:
            missing.append(name)
    assert missing == []
