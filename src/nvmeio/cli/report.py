"""Where figures go: JSON in a file or on standard output, and a chart."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvmeio.cli import plots
from nvmeio.cli.arguments import Parser

__all__ = ["add_options", "keep"]


def add_options(parser: Parser, times: str, chart: str) -> None:
    """Add the options that say where figures go.

    Parameters
    ----------
    parser : Parser
        Of a command.
    times : str
        Of what there are figures, such as "every round".
    chart : str
        What is drawn, such as "a chart".
    """
    parser.add_argument(
        "--json",
        type=_target,
        metavar="FILE",
        help=f"write the figures of {times}; - is standard output",
    )
    parser.add_argument(
        "--plot", type=plots.picture, metavar="FILE.png|.svg", help=f"draw {chart}"
    )


def keep(report: Mapping[str, Any], target: str | None) -> None:
    """Write a report.

    Parameters
    ----------
    report : dict
        What JSON can hold.
    target : str or None
        The name of a file, "-" for standard output, or None for nowhere.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    text = json.dumps(report, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    elif target is not None:
        Path(target).write_text(text, encoding="utf-8")


def _target(text: str) -> str:
    """Return the name of a file, once it is sure that one can be made."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return text
