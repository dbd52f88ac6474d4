"""Figures as JSON: in a file, or on standard output."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["keep", "target"]


def target(text: str) -> str:
    """Read where a report goes, so that it is not in vain that it was made.

    Parameters
    ----------
    text : str
        The name of a file, or "-".

    Returns
    -------
    str
        The same.

    Raises
    ------
    argparse.ArgumentTypeError
        The file's folder does not exist, or it is one itself.
    """
    path = Path(text)
    if text != "-" and (path.is_dir() or not path.parent.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a file, in a folder")
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
