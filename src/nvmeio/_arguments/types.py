"""Types that appear in more than one signature."""

import os
from typing import Protocol

__all__ = ["FileLike", "HasFileno", "Path"]

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class HasFileno(Protocol):
    """A file object with a descriptor, such as a File."""

    def fileno(self) -> int:
        """Return the descriptor."""


FileLike = Path | int | HasFileno
