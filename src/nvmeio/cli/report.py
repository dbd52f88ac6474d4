"""Figures as JSON: in a file, or on standard output."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["keep", "target"]


def target(text: str) -> str:
    """Read the name of a file for a report, before anything is measured for it.

    Parameters
    ----------
    text : str
        A name, or "-" for standard output.

    Returns
    -------
    str
        The same.

    Raises
    ------
    argparse.ArgumentTypeError
        Its folder does not exist, or it is a folder itself.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return text


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
