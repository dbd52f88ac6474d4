"""nvmeio completion: the script that it prints, and what bash then offers."""

import shlex
import subprocess

import pytest

from commands import nvmeio as run_nvmeio

pytest.importorskip("shtab", reason="shtab is not installed")

# What bash does when Tab is pressed after the last word.
PRESS_TAB = """
source ./script
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$(complete -p nvmeio | sed 's/.*-F \\([^ ]*\\).*/\\1/') nvmeio
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script():
    """Return the script for bash."""
    found = run_nvmeio("completion", "bash")
    assert (found.status, found.err) == (0, "")
    return found.out


@pytest.fixture
def offered(script, tmp_path):
    """Return a function that returns bash's completions of the last of some words."""
    (tmp_path / "script").write_text(script)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "run").mkdir()

    def press_tab(*words):
        code = PRESS_TAB.format(words=shlex.join(words))
        found = subprocess.run(
            ["bash", "--norc", "-eu", "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stderr == ""
        return sorted(filter(None, found.stdout.split("\n")))

    return press_tab


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nvmeio", "c"), ["checkpoints", "completion"]),
        (("nvmeio", "tune", "--no"), ["--no-save"]),
        (("nvmeio", "bench", "--engine", "li"), ["libaio"]),
        (("nvmeio", "inspect", "mod"), ["model.safetensors"]),
        (("nvmeio", "verify", "r"), ["run"]),
        (("nvmeio", "verify", "run", "mod"), []),
        (("nvmeio", "tune", "r"), ["run"]),
        (("nvmeio", "tune", "mod"), []),
        (("nvmeio", "bench", "--json", "mod"), ["model.safetensors"]),
        (("nvmeio", "completion", ""), ["bash", "zsh"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bash_offers_commands_options_values_and_paths(offered, words, expected):
    assert offered(*words) == expected


def test_the_script_for_zsh_fits_its_function_path():
    found = run_nvmeio("completion", "zsh")
    assert (found.status, found.err) == (0, "")
    assert found.out.startswith("#compdef nvmeio\n")
    assert ":_files" in found.out


def test_without_shtab_the_error_says_what_to_install():
    found = run_nvmeio("completion", "bash", without=["shtab"])
    assert (found.status, found.out) == (1, "")
    assert found.err == (
        "nvmeio completion: error: shtab is not installed: pip install shtab\n"
    )
