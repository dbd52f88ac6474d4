"""``nvmeio verify``: read checkpoints, and compare them with their checksums."""

import argparse
import os
from collections.abc import Callable, Iterator

from nvmeio._cli.arguments import CommandError, Parser, sentence
from nvmeio._cli.folders import step_of
from nvmeio._cli.terminal import Terminal, harmless
from nvmeio._files.kinds import METADATA, what_is_in
from nvmeio._files.paths import exists
from nvmeio.checkpoint import Checkpointer, CheckpointError

NOTES = """\
Reads all bytes of the steps in each DIR, or of the step that DIR is, and
compares them with the checksums that nvmeio.checkpoint saved.  Damaged steps
are reported on standard error, and the rest are still read; the exit status is
then 1.

examples:
  nvmeio verify run
  nvmeio verify run/step-100
"""


def configure(parser: Parser) -> None:
    parser.epilog = NOTES
    about = "the folder of a Checkpointer, or of one of its steps"
    parser.add_argument("folders", metavar="DIR", nargs="+", help=about)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Verify checkpoints; return 1 if one is damaged or a folder has none."""
    verified = bad = 0
    for folder in options.folders:
        try:
            steps = list(_steps(folder))
        except (CommandError, OSError) as error:
            terminal.note(f"nvmeio verify: error: {harmless(sentence(error))}")
            bad += 1
            continue
        for checkpointer, step, name in steps:
            verified += 1
            try:
                checkpointer.verify(step, progress=_progress(name, terminal))
            except (CheckpointError, OSError, MemoryError) as error:
                listed = step_of(folder) is None
                if listed and isinstance(error, FileNotFoundError) and not exists(name):
                    # By a run that goes on, since its steps were listed.
                    verified -= 1
                    terminal.say(f"{harmless(name)}: removed meanwhile")
                    continue
                bad += 1
                terminal.note(f"nvmeio verify: error: {harmless(sentence(error))}")
            else:
                terminal.say(f"{harmless(name)}: OK")
    terminal.say(f"{verified} checkpoint{'s' * (verified != 1)}, {bad} bad")
    return 1 if bad else 0


def _steps(folder: str) -> Iterator[tuple[Checkpointer, int, str]]:
    """Yield the steps of a root, or the one that a folder is, each with its folder."""
    root, checkpointer = folder, Checkpointer(folder)
    steps = checkpointer._steps.root.steps()[::-1]
    one = step_of(folder)
    # A checkpoint of torch.distributed.checkpoint may be in a folder with such a name.
    if not steps and one is not None and not os.path.exists(os.path.join(folder, METADATA)):
        root, steps = one[0], [one[1]]
        checkpointer = Checkpointer(root)
    if not steps:
        words = f"{folder}: there are no checkpoints of nvmeio.checkpoint; "
        words += what_is_in(folder)
        raise CommandError(words)
    for step in steps:
        yield checkpointer, step, os.path.join(root, f"step-{step}")


def _progress(name: str, terminal: Terminal) -> Callable[[int, int], None]:
    """Return a function that shows how many bytes of a step were read, of how many."""
    advance = terminal.progress(name, 1)
    before = 0.0

    def show(done: int, total: int) -> None:
        nonlocal before
        advance(done / total - before)
        before = done / total

    return show
