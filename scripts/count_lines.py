"""Count the lines of the tracked files by area: all, and those that are code.

Code is what is neither blank, comment nor docstring.  docs/decisions.md has the figures.
"""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

AREAS = {
    "package": (
        "src/*.py",
        "src/*.pyx",
        "src/*.pxd",
        "src/*.pyi",
        "src/*.pth",
        "src/bin/*",
    ),
    "C library": ("src/libnvmeio/*.[ch]", "include/*"),
    "tests": ("tests/*.py", "tests/*.[ch]", "tests/*.mk"),
    "mutants": ("tests/mutants/*",),
    "benchmarks": ("bench/*.py", "bench/*.[ch]"),
    "documentation": ("*.md", "docs/*.rst"),
    "examples": ("examples/*",),
    "scripts and build": ("scripts/*", "docs/*.py", "setup.py", "Makefile", ".ci/run"),
}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
DOCSTRING = re.compile(r'^\s*[rR]?"""(?:[^"]|"(?!""))*"""\s*$', re.MULTILINE)
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
NOT_CODE |= {tokenize.DEDENT, tokenize.ENDMARKER}


def listed(patterns: tuple[str, ...]) -> list[Path]:
    command = ["git", "ls-files", "--", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = map(Path, names.splitlines())
    return [path for path in paths if path.exists() and "corpus" not in path.parts]


def docstring_lines(text: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return found


def without_comments(text: str) -> str:
    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else "\n" * found[0].count("\n")

    return COMMENT.sub(blank, text)


def code_lines(path: Path, text: str) -> int:
    if path.suffix in (".py", ".pyi"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        spans = ((t.start[0], t.end[0]) for t in tokens if t.type not in NOT_CODE)
        used = {number for first, last in spans for number in range(first, last + 1)}
        return len(used - docstring_lines(text))
    if path.suffix in (".c", ".h"):
        text = without_comments(text)
    elif path.suffix in (".pyx", ".pxd"):
        text = DOCSTRING.sub("", text)
    return sum(bool(re.match(r"\s*[^#\s]", line)) for line in text.splitlines())


def main() -> None:
    print(f"{'area':20}{'files':>8}{'lines':>9}{'code':>9}")
    for area, patterns in AREAS.items():
        paths = listed(patterns)
        texts = [(path, path.read_text(encoding="utf-8")) for path in paths]
        lines = sum(text.count("\n") for _, text in texts)
        code = "" if area == "documentation" else sum(code_lines(*each) for each in texts)
        print(f"{area:20}{len(paths):8}{lines:9}{code:>9}")


if __name__ == "__main__":
    main()
