"""Check that tests/uncovered.md names every function that has a branch no test takes."""

import json
import re
import sys
from pathlib import Path

LIST = Path("tests/uncovered.md")


def named_functions(text: str) -> set[tuple[str, str]]:
    """Return the file and name of each function in the table."""
    found = set()
    for line in text.splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) != 3 or not (file := re.fullmatch(r" `(\w+\.[ch])` ", cells[1])):
            continue
        found |= {(file[1], name) for name in re.findall(r"`(\w+)`", cells[2])}
    return found


def missing_functions(report: dict) -> dict[tuple[str, str], list[int]]:
    """Return the lines that have branches that were not taken, by function."""
    found: dict[tuple[str, str], list[int]] = {}
    for file in report["files"]:
        for line in file["lines"]:
            if any(branch["count"] == 0 for branch in line["branches"]):
                key = (Path(file["file"]).name, line["function_name"])
                found.setdefault(key, []).append(line["line_number"])
    return found


def main(path: str) -> None:
    """Compare the list with gcovr's report, a JSON file."""
    missing = missing_functions(json.loads(Path(path).read_text(encoding="utf-8")))
    named = named_functions(LIST.read_text(encoding="utf-8"))
    for file, name in sorted(named - missing.keys()):
        print(f"{LIST} names {name}() of {file}, of which every branch was taken this time")
    nameless = sorted(missing.keys() - named)
    for file, name in nameless:
        lines = ", ".join(map(str, missing[file, name]))
        print(f"{file}:{lines}: {name}() has branches that no test takes", file=sys.stderr)
    if nameless:
        sys.exit(f"test these branches, or name them in {LIST} with the reason")


if __name__ == "__main__":
    main(sys.argv[1])
