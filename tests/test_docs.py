"""The pages for users are right: everything that they show is run, or listed.

The list is unrun.py, with the reasons; its commands are checked as far as possible.
"""

import configparser
import json
import re
from pathlib import Path

import pytest
import yaml

from helpers import ENGINES
from nvmeio._config.constants import BOUNCES, DEFAULTS, LIMITS
from nvmeio._config.options import unknown_variables
from pages import (
    FENCED,
    PAGES,
    ROOT,
    RUN_ONCE,
    blocks_of,
    commands_of,
    inline_commands_of,
    read_page,
    run_page,
    steps_of,
)
from unrun import DRAWINGS, UNRUN

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [
    (block.page, command)
    for block in BLOCKS
    if block.is_shell
    for command in commands_of(block)
]
# Pages that compile something.
PACKAGING = {"docs/embedding.md"}
LINKED = [
    *PAGES,
    "CONTRIBUTING.md",
    "bench/README.md",
    "src/libnvmeio/README.md",
    "tests/stress/README.md",
]

PARSERS = {
    "c": None,
    "cython": None,
    "ini": lambda text: configparser.ConfigParser().read_string(text),
    "json": json.loads,
    "python": lambda text: compile(text, "page", "exec"),
    "text": lambda text: all(len(line.split()) == 4 for line in text.splitlines()),
    "yaml": yaml.safe_load,
}


def pages_that_do_something():
    """Return the pages that have something to run, as parameters."""
    return [
        pytest.param(page, marks=[pytest.mark.packaging] if page in PACKAGING else [])
        for page in PAGES
        if any(steps_of(page))
    ]


@pytest.mark.parametrize("page", pages_that_do_something())
def test_what_a_page_shows_can_be_done_from_top_to_bottom(page, tmp_path):
    if any("import torch" in block.text for block in blocks_of(page)):
        pytest.importorskip("torch")
    done = run_page(page, tmp_path, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_that_runs_on_one_page_runs_there():
    for words, page in RUN_ONCE.items():
        assert words in [
            command.words
            for b in blocks_of(page)
            if b.is_shell
            for command in commands_of(b)
        ]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_every_block_is_run_or_listed(block):
    first_line = block.text.partition("\n")[0]
    is_code = block.language == "python" and block.info in ("", "deepspeed")
    kinds = [block.is_file, block.is_shell, is_code, first_line in DRAWINGS]
    assert kinds.count(True) == 1


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.is_file], ids=lambda block: block.info
)
def test_a_file_on_a_page_can_be_read_and_is_used_there(block):
    if PARSERS[block.language]:
        assert PARSERS[block.language](block.text) is not False
    rest = read_page(block.page).replace(block.text, "")
    assert rest.count(block.info) > 1


@pytest.mark.parametrize("page", PAGES)
def test_a_command_in_a_sentence_is_run_by_a_block(page):
    run = [f"{command.words} " for _, command in COMMANDS if command.words not in UNRUN]
    for command in inline_commands_of(page):
        assert any(known.startswith(f"{command} ") for known in run), command


@pytest.mark.parametrize("command", UNRUN)
def test_the_syntax_of_commands_that_are_not_run_is_right(command):
    pages = {page for page, found in COMMANDS if found.words == command}
    assert pages, "it is on no page"
    assert UNRUN[command].reason
    UNRUN[command].check(command, "".join(map(read_page, pages)))


def test_blocks_listed_as_drawings_are_drawings():
    shown = [block.text.partition("\n")[0] for block in BLOCKS]
    assert [line for line in DRAWINGS if shown.count(line) != 1] == []


def anchors_of(path):
    """Return the anchors of headings, as GitHub makes them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_to_existing_files_and_headings(page):
    text = FENCED.sub("", read_page(page))
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path), target


def test_every_page_is_linked_from_the_index_and_the_index_from_the_readme():
    index = read_page("docs/index.md")
    for page in PAGES[1:]:
        name = Path(page).name
        assert name == "index.md" or f"]({name})" in index, name
    assert "](docs/index.md)" in read_page("README.md")


def test_the_stress_test_that_is_replayed_exists():
    page = read_page("tests/stress/README.md")
    name, place, engine = re.search(r"SEED='(\w+)\[([\w-]+?)-(\w+)\]:\d+'", page).groups()
    assert f"def {name}(place, engine, " in read_page("tests/stress/test_model.py")
    assert f'"{place}"' in read_page("tests/stress/places.py")
    assert engine in ENGINES


def variables_of(text):
    """Return the environment variables that a source file names or reads."""
    named = re.findall(r"\b(NVMEIO_[A-Z_]*[A-Z])\b", text)
    asked = re.findall(r"environ(?:\.get\(|\[)\s*\"(\w+)\"", text)
    return {*named, *asked}


def test_the_table_of_variables_has_exactly_those_that_the_sources_read():
    patterns = ("setup.py", "src/**/*.py", "src/**/*.pyx", "src/**/*.pth")
    sources = [path for pattern in patterns for path in ROOT.glob(pattern)]
    headers = [*ROOT.glob("include/**/*.h"), *ROOT.glob("src/libnvmeio/*.[ch]")]
    names_of_c = set().union(*(variables_of(path.read_text()) for path in headers))
    # Constants of C, which Cython code names too, are no variables.
    read = set().union(*(variables_of(path.read_text()) for path in sources)) - names_of_c
    page = read_page("docs/environment.md")
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \|", page, re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    for path in headers:
        read |= set(re.findall(r'\bgetenv\("(\w+)"\)', path.read_text()))
    # The command line reads these to learn about its terminal and container.
    assert sorted(told) == sorted(read - {"TERM", "KUBERNETES_SERVICE_HOST", "container"})
    # So that `nvmeio doctor` does not call one of them misspelt.
    own = [name for name in told if name.startswith("NVMEIO_")]
    assert unknown_variables(own) == {}


def test_the_table_of_options_has_the_limits_and_defaults_of_the_code():
    words = {"engine": ("auto", *ENGINES), "bounce": BOUNCES, "direct": ("auto", "1", "0")}
    rows = []
    for option, default in DEFAULTS.items():
        values = ", ".join(words.get(option, ("0", "1")))
        if option in LIMITS:
            values = f"1 to {LIMITS[option]}"
        shown = int(default) if default is False else default
        rows.append((f"NVMEIO_{option.upper()}", values, str(shown)))
    table = read_page("docs/environment.md").replace("`", "").replace(" bytes", "")
    found = re.findall(r"^\| (N\w+) \| (.*?) \| (.*?) \| ", table, re.MULTILINE)
    assert found[: len(rows)] == rows


def test_the_tables_of_faults_have_the_kinds_that_fault_c_has():
    source = (ROOT / "tests" / "faults" / "fault.c").read_text(encoding="utf-8")
    found = re.findall(r'\.name = "(\w+)"(, \.harmless = true)?', source)
    page = read_page("docs/reliability.md")
    _, unnoticed, rest = re.split("^What a caller .*:$", page, flags=re.MULTILINE)
    seen, _, _ = rest.partition("\nThese calls ")
    for table, harmless in ((unnoticed, True), (seen, False)):
        cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        told = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
        assert set(told) == {name for name, mark in found if bool(mark) == harmless}
