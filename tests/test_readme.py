"""What the README shows is true here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nvmeio

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language):
    """Return the code blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_example_is_short_and_runs(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    example = code_blocks("python")[0]
    assert len([line for line in example.splitlines() if line]) <= 20
    run = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    engine = nvmeio.Handle().stats()["engine"]
    assert run.stdout.splitlines() == [
        "32000096 bytes written",
        f"32000096 bytes read by {engine}",
        "equal: True",
    ]
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {
        "weights.bin": 1000 * 1001 * 8,
        **{f"{i}.bin": 1_000_003 * 4 for i in range(8)},
    }


def test_its_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert {"docs/design.md", "CONTRIBUTING.md", "bench/README.md"} <= set(targets)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_name_of_nvmeio_that_it_mentions_exists():
    names = set(re.findall(r"\bnvmeio\.([a-z]\w+)\b(?!\.)", README)) - {"readme"}
    assert "aio_handle" in names
    assert [name for name in sorted(names) if not hasattr(nvmeio, name)] == []
