"""The directive `command-line`: the help of every command, as --help prints it."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nvmeio import _cli

__all__ = ["setup"]


class CommandLine(SphinxDirective):
    """A section for each command, and one for what they have in common."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        parser = _cli._parser()
        (commands,) = parser._subparsers._group_actions
        parsers = {"nvmeio": parser} | {
            f"nvmeio {name}": command for name, command in commands.choices.items()
        }
        return [_section(name, each.format_help()) for name, each in parsers.items()]


def _section(name: str, text: str) -> nodes.section:
    section = nodes.section(ids=[nodes.make_id(name)], names=[name])
    section += nodes.title("", "", nodes.literal("", name))
    section += nodes.literal_block(text, text, language="none")
    return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
