"""Types that appear in more than one signature."""

import os

__all__ = ["Path"]

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
