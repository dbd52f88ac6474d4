"""``nvmeio completion``: print a completion script for bash or zsh."""

import argparse
from collections.abc import Iterator

from nvmeio._cli.arguments import CommandError, Parser
from nvmeio._cli.terminal import Terminal

NOTES = """\
Prints a script that completes commands, options and paths.  This command needs
the package shtab, from the extra cli; the script needs nothing.

examples:
  nvmeio completion bash > ~/.local/share/bash-completion/completions/nvmeio
  nvmeio completion zsh > ~/.zfunc/_nvmeio   (with ~/.zfunc in fpath)
"""

# Names of arguments that are directories, and of those that are any path.
FOLDERS = ("DIR", "ROOT")
PATHS = ("FILE", "PATH")


def configure(parser: Parser) -> None:
    parser.epilog = NOTES
    parser.add_argument("shell", choices=("bash", "zsh"), help="whose script to print")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Print the script."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install shtab") from None
    for action in _actions(options.whole):
        if str(action.metavar).startswith(PATHS):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    terminal.say(shtab.complete(options.whole, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
