"""pages.py finds what pages show, and run_page.py fails if it is wrong."""

import pytest

from pages import Block, commands_of, run_steps, steps_of

SHOWN = """\
$ echo one two; \\
  echo three
one ...
three
$ cat <<'EOF'
$ no command
EOF
$ exit 3  # exit status 3
$ true
"""


def commands_in(text, language="console"):
    """Return the commands of a block that begins on line 10 of a page."""
    return commands_of(Block("page.md", 10, language, "", text))


def step(**what):
    """Return a step of a page."""
    return {"page": "page.md", "line": 1} | what


def command(text, status=0, output=None):
    """Return a step that runs a command."""
    return step(kind="command", text=text, status=status, output=output)


def test_commands_have_their_lines_their_status_and_their_output():
    first, second, third, fourth = commands_in(SHOWN)
    assert first.words == "echo one two; echo three"
    assert (first.line, first.output) == (11, "one ...\nthree\n")
    assert second.text == "cat <<'EOF'\n$ no command\nEOF"
    assert (second.line, second.output) == (15, None)
    assert (third.text, third.status) == ("exit 3", 3)
    assert (fourth.text, fourth.status) == ("true", 0)


def test_a_block_of_sh_has_only_commands():
    commands = commands_in("# why\na \\\n  b\n\nc # exit status 1\n", "sh")
    assert [found.words for found in commands] == ["a b", "c"]
    assert [found.status for found in commands] == [0, 1]
    assert all(found.output is None for found in commands)


def test_output_without_a_command_is_an_error():
    with pytest.raises(ValueError, match=r"page.md:10: no command: 'one'"):
        commands_in("one\n$ two\n")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([command("exit 1")], "exit status 1"),
        ([command("true", status=1)], "exit status 0"),
        ([command("echo one", output="two\n")], "printed:\none"),
        ([command("echo one >&2", output="two\n")], "printed:\none"),
        ([step(kind="python", text="assert 1 == 2")], "AssertionError"),
    ],
)
def test_a_step_that_differs_from_the_page_fails(tmp_path, steps, words):
    done = run_steps(steps, tmp_path)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_step_that_agrees_with_the_page_passes(tmp_path):
    steps = [
        step(kind="file", name="seven.py", text="number = 7\n"),
        command("ls", output="seven.py\n"),
        command("exit 3", status=3),
        command("echo from 1 to   9", output="from ... to 9\n"),
        step(kind="python", text="import seven\n\ndef given():\n    return seven.number\n"),
        step(kind="python", text="assert __name__ == '__main__' and given() == 7\n"),
    ]
    done = run_steps(steps, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_traceback_shows_the_line_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\n\nraise KeyError('here')\n```\n")
    shown = {"page": str(page), "line": 3, "kind": "python"}
    done = run_steps([shown | {"text": "\nraise KeyError('here')\n"}], tmp_path)
    assert f'File "{page}", line 5' in done.stderr
    assert "raise KeyError('here')\n" in done.stderr


def test_a_command_that_is_not_run_leaves_its_files():
    steps = [*steps_of("docs/troubleshooting.md")]
    names = {found["name"] for found in steps if found["kind"] == "file"}
    assert {"default.json", "container.json"} <= names
    commands = [found["text"] for found in steps if found["kind"] == "command"]
    assert commands
    assert not any(text.startswith(("curl", "docker", "sysctl")) for text in commands)
