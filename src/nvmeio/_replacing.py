"""Files that take another's place when they are complete."""

import contextlib
import os
import secrets
from collections.abc import Iterator

__all__ = ["replacement"]


@contextlib.contextmanager
def replacement(target: str) -> Iterator[str]:
    """Name a file beside another, whose place it takes if all goes well."""
    # Of a length of its own: a name that is long already has no room for a suffix.
    name = f".nvmeio-{secrets.token_hex(8)}.tmp"
    temporary = os.path.join(os.path.dirname(target), name)
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
