"""Compare the files of a folder with what its index says of them."""

import os
import stat

from nvmeio._files.kinds import because_of_kind
from nvmeio._files.paths import is_within

__all__ = ["wrong_with"]


def wrong_with(folder: str, name: str, nbytes: int, *, exactly: bool = False) -> str | None:
    """Say what is wrong with a file that an index names; None if it is all there.

    It must have `nbytes` bytes, or more unless `exactly`.
    """
    path = os.path.join(folder, name)
    if not is_within(name):
        return f"{folder}: the index names {name!r:.200}, which is not in this folder"
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is not a regular file"
    size = found.st_size
    if size < nbytes:
        words = f"{path} was truncated: it has {size} bytes, and the index says {nbytes}"
        return words + because_of_kind(path)
    if exactly and size > nbytes:
        return f"{path} has {size} bytes, and the index says {nbytes}"
    return None
