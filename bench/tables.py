"""Fill the tables of measurements in the documentation from the committed JSON.

A table is between ``<!-- table: STYLE of SCRIPT from FILE -->`` and ``<!-- end -->``.
STYLE is a key of `report.STYLES`.  SCRIPT is the name of a script, such as gather, or all.
FILE is in bench/results, or "latest" for the newest that `make bench` has written.
"where REGEX" at the end of the comment selects comparisons by "work: first / second".
``--check`` changes nothing: it shows the differences, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from report import STYLES, Table, picked, scripts_of

__all__ = ["filled", "latest", "main"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/*.md", "bench/*.md", "bench/results/*.md")

REGION = re.compile(
    r"^(?P<begin><!-- table: (?P<style>[a-z ]+?) of (?P<script>\w+) from (?P<file>\S+)"
    r"(?: where (?P<where>.+?))? -->\n)(?P<rows>.*?)(?P<end>^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)


def latest(results: Path) -> Path:
    """Return the newest file that has all scripts, by the date in its name."""
    for path in sorted(results.glob("????-??-??-*.json"), reverse=True):
        if "scripts" in json.loads(path.read_text(encoding="utf-8")):
            return path
    raise FileNotFoundError(f"no JSON of `make bench` in {results}")


def compact(table: Table) -> str:
    """Format a table as Markdown. Without padding, a new figure only changes its row."""
    head, rows = table
    if not rows:
        return "None.\n"
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(text: str, results: Path) -> str:
    """Return a page with its tables filled again."""

    def made(region: re.Match[str]) -> str:
        name = region["file"]
        scripts = scripts_of(latest(results) if name == "latest" else results / name)
        if region["script"] != "all":
            scripts = {region["script"]: scripts[region["script"]]}
        if region["where"]:
            scripts = {
                key: dataclasses.replace(o, comparisons=picked(o, region["where"]))
                for key, o in scripts.items()
            }
            if not any(outcome.comparisons for outcome in scripts.values()):
                raise ValueError(f"{region['where']!r} matches nothing in {name}")
        table = compact(STYLES[region["style"]](scripts))
        return f"{region['begin']}\n{table}\n{region['end']}"

    return REGION.sub(made, text)


def pages(root: Path) -> Iterator[Path]:
    """Yield the pages that have tables."""
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            if REGION.search(path.read_text(encoding="utf-8")):
                yield path


def main(given: list[str] | None = None, root: Path = ROOT) -> int:
    """Fill the tables, or check them, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only show what would change")
    check = parser.parse_args(given).check
    differs = False
    for path in pages(root):
        before = path.read_text(encoding="utf-8")
        after = filled(before, root / "bench" / "results")
        if after == before:
            continue
        differs = True
        name = str(path.relative_to(root))
        if check:
            lines = (text.splitlines(keepends=True) for text in (before, after))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name}, made anew"))
        else:
            path.write_text(after, encoding="utf-8")
            print(f"tables: updated {name}", file=sys.stderr)
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
