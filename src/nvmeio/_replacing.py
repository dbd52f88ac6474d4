"""Files that take another's place when they are complete."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator

__all__ = ["create_like", "replacement"]


@contextlib.contextmanager
def replacement(target: str, *, overwrite: bool = True) -> Iterator[str]:
    """Name a file beside another, whose place it takes if all goes well.

    With ``overwrite=False`` there must be no other, and none that has come meanwhile.
    """
    # Of a length of its own: a name that is long already has no room for a suffix.
    name = f".nvmeio-{secrets.token_hex(8)}.tmp"
    temporary = os.path.join(os.path.dirname(target), name)
    try:
        yield temporary
        (os.replace if overwrite else _rename_to_new)(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def create_like(temporary: str, target: str) -> None:
    """Create a file that is to replace another, with its mode and, if allowed, its owner.

    Nobody can read it meanwhile who could not read the other.
    """
    try:
        owner = os.stat(target)
    except FileNotFoundError:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        return
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with contextlib.suppress(PermissionError):
        os.chown(temporary, owner.st_uid, owner.st_gid)
    shutil.copymode(target, temporary)


def _rename_to_new(temporary: str, target: str) -> None:
    """Rename a file to a name that nothing may have."""
    try:
        # A link never replaces, as renaming would.
        os.link(temporary, target)
        os.unlink(temporary)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # There are no links, as on FAT: what comes in this very moment is overwritten.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.replace(temporary, target)
