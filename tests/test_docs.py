"""What pages and README show can be done from top to bottom, and their links lead on."""

import configparser
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import yaml

import nvmeio
from helpers import ENGINES
from nvmeio._cli import _parser
from nvmeio._cli.problems import OTHERS
from nvmeio._config.constants import BOUNCES, DEFAULTS, LIMITS
from pages import FENCED, PAGES, ROOT, blocks_of, read_page, run_page, steps_of

# Pages that compile something.
PACKAGING = {"docs/embedding.md"}
LINKED = [
    *PAGES,
    "CONTRIBUTING.md",
    "bench/README.md",
    "bench/results/latest.md",
    "src/libnvmeio/README.md",
    "tests/stress/README.md",
]
PARSERS = {
    "ini": lambda text: configparser.ConfigParser().read_string(text),
    "json": json.loads,
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
    if any(re.search("(import|from) torch", block.text) for block in blocks_of(page)):
        pytest.importorskip("torch")
    done = run_page(page, tmp_path, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal: False" not in done.stdout, "an example prints that bytes differ"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_run_or_says_that_it_is_not(page):
    for block in blocks_of(page):
        kinds = [block.is_file, block.is_shell, block.language in ("text", "pycon")]
        kinds += [
            block.language == "python",
            (block.language, block.info) == ("sh", "unrun"),
        ]
        assert any(kinds), (
            f"{page}:{block.line}: begin the block with ```python, ```sh, ```console, "
            "```LANGUAGE FILENAME, or, if it cannot be run, ```sh unrun or ```text"
        )
        if block.is_file and block.language in PARSERS:
            PARSERS[block.language](block.text)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_nvmeio_that_are_not_run_are_understood(page):
    for block in blocks_of(page):
        for line in block.text.splitlines() if block.info == "unrun" else ():
            if line.startswith("nvmeio "):
                _parser().parse_args(shlex.split(line, comments=True)[1:])


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
        assert path.exists(), f"{page} links {target}: correct the name of the file"
        found = not anchor or anchor in anchors_of(path)
        assert found, f"{page} links {target}: correct the part after #"


def test_every_page_is_linked_from_the_index():
    index = read_page("docs/index.md")
    for page in {*PAGES} - {"README.md", "docs/index.md"}:
        assert f"]({Path(page).name})" in index, f"link {page} from docs/index.md"


def test_every_name_of_nvmeio_in_the_readme_exists():
    pytest.importorskip("torch", reason="torch is not installed")
    names = set(re.findall(r"\bnvmeio(?:\.[A-Za-z]\w*)+", read_page("README.md")))
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)


def test_the_page_of_variables_has_all_with_the_values_of_the_code():
    words = {"engine": ("auto", *ENGINES), "bounce": BOUNCES, "direct": ("auto", "1", "0")}
    rows = [f"| NVMEIO_{name} |" for name in OTHERS]
    for option, default in DEFAULTS.items():
        values = ", ".join(words.get(option, ("0", "1")))
        if option in LIMITS:
            values = f"1 to {LIMITS[option]}"
        shown = int(default) if default is False else default
        rows.append(f"| NVMEIO_{option.upper()} | {values} | {shown} |")
    page = read_page("docs/environment.md").replace("`", "").replace(" bytes |", " |")
    for row in rows:
        assert row in page, f"docs/environment.md lacks a row that begins with {row}"


def test_every_counter_of_a_handle_is_described():
    counters, told = nvmeio.default_handle().stats(), nvmeio.Handle.stats.__doc__
    missing = [name for name in counters if f"``{name}``" not in told]
    assert not missing, f"describe {missing} in the docstring of Handle.stats"
