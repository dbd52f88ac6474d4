"""Figures as JSON: in a file, or on standard output."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["keep"]


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
