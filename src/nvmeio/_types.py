"""Types that appear in more than one signature."""

import os
from typing import TypedDict

from nvmeio._build import BuildRecord

__all__ = ["BuildInfo", "EngineInfo", "Path"]

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class EngineInfo(TypedDict):
    """What was found out about one engine."""

    built: bool
    works: bool
    errno: int
    reason: str


class BuildInfo(BuildRecord):
    """What this installation consists of."""

    engines: dict[str, EngineInfo]
