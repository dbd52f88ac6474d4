"""Find and run the commands and the code that the pages for users show.

A fenced block of a page is a file if a file name follows the language
(```` ```c gather.c ````).  `python` is code; `sh` shows commands, and `console` shows them
after ``$ ``, with their output.  `sh unrun`, `text` and `pycon` are not run, blocks with
`deepspeed` only beside it.  Everything on a page runs in one folder, from top to
bottom, its Python in one process.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "PAGES",
    "ROOT",
    "blocks_of",
    "file_of",
    "read_page",
    "run_page",
    "steps_of",
]

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]

FENCED = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"[\w-]+\.\w+")
STATUS = re.compile(r"\s+# exit status (\d+)$")
HERE_DOCUMENT = re.compile(r"<<\s*'?(\w+)'?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its place, its language and information, its text."""

    page: str
    line: int
    language: str
    info: str
    text: str

    @property
    def is_file(self):
        return FILE_NAME.fullmatch(self.info) is not None

    @property
    def is_shell(self):
        return self.language in ("sh", "console") and self.info in ("", "deepspeed")

    @property
    def needs_deepspeed(self):
        return self.info == "deepspeed"


def read_page(page):
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page):
    """Return the fenced blocks of a page."""
    text = read_page(page)
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, *found.groups())
        for found in FENCED.finditer(text)
    ]


def file_of(page, name):
    """Return the text of a file that a page shows."""
    (text,) = (block.text for block in blocks_of(page) if block.info == name)
    return text


def commands_of(block):
    """Yield the commands of a shell block: line, text, exit status, and output or None."""
    prompt = "$ " if block.language == "console" else ""
    lines = block.text.splitlines()
    at = 0
    while at < len(lines):
        begin, ended = at, _end_of(lines, at)
        at = ended
        while prompt and at < len(lines) and not lines[at].startswith(prompt):
            at += 1
        text = "\n".join(lines[begin:ended])
        if not text.startswith(prompt):
            raise ValueError(f"{block.page}:{block.line}: no command: {text!r}")
        text = text.removeprefix(prompt)
        if not text or text.startswith("#"):
            continue
        found = STATUS.search(text)
        yield {
            "line": block.line + 1 + begin,
            "text": STATUS.sub("", text),
            "status": int(found[1]) if found else 0,
            "output": "\n".join([*lines[ended:at], ""]) if at > ended else None,
        }


def _end_of(lines, at):
    """Return the index after a command, with its continued lines and here-documents."""
    here = HERE_DOCUMENT.search(lines[at])
    if here:
        return lines.index(here[1], at) + 1
    while lines[at].endswith("\\"):
        at += 1
    return at + 1


def steps_of(page, *, deepspeed=False):
    """Yield the steps of a page for run_page.py."""
    for block in blocks_of(page):
        where = {"page": str(ROOT / page), "line": block.line}
        if block.needs_deepspeed and not deepspeed:
            continue
        if block.is_file:
            yield where | {"kind": "file", "name": block.info, "text": block.text}
        elif block.is_shell:
            for command in commands_of(block):
                yield where | {"kind": "command"} | command
        elif block.language == "python":
            yield where | {"kind": "python", "text": block.text}


def run_page(page, folder, *options, deepspeed=False):
    """Run everything that a page shows in a folder; return the finished process."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # Tests must not touch the user's own files of nvmeio.
        "XDG_CONFIG_HOME": str(folder / ".config"),
    }
    return subprocess.run(
        [sys.executable, *options, Path(__file__).with_name("run_page.py")],
        input=json.dumps([*steps_of(page, deepspeed=deepspeed)]),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
