"""Run the steps that pages.py has found on a page, from JSON on standard input."""

import doctest
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

OUTPUT = doctest.OutputChecker()
RULES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_command(step):
    """Run a command; check its exit status and output against the page."""
    done = subprocess.run(
        ["sh", "-c", step["text"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    where = f"{step['page']}:{step['line']}: {step['text']}"
    if done.returncode != step["status"]:
        sys.exit(f"{where}\nexit status {done.returncode}\n{done.stdout}")
    wanted = step["output"]
    if wanted is not None and not OUTPUT.check_output(wanted, done.stdout, RULES):
        sys.exit(f"{where}\nprinted:\n{done.stdout}")


def run_python(step, namespace):
    """Run code; its tracebacks have the page's line numbers."""
    importlib.invalidate_caches()
    code = "\n" * step["line"] + step["text"]
    exec(compile(code, step["page"], "exec"), namespace)


def main():
    """Run all steps; their Python is one program."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    sys.path[0] = ""
    steps = json.load(sys.stdin)
    for step in steps:
        if step["kind"] == "file":
            Path(step["name"]).write_text(step["text"], encoding="utf-8")
        elif step["kind"] == "command":
            run_command(step)
        else:
            run_python(step, vars(program))
    if any(
        step["kind"] == "python" and "init_process_group" in step["text"] for step in steps
    ):
        # A thread of gloo that takes the GIL while Python exits would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
