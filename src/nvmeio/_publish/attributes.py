"""Give a new file or folder the mode, owner and attributes of the one that it replaces."""

import errno
import os
import stat

from nvmeio._files.descriptors import best_effort
from nvmeio._files.paths import exists_now

__all__ = ["become_like"]


def become_like(descriptor: int, target: str) -> None:
    """Copy mode, owner and attributes from a file, as far as permitted.

    Not from one that another user has put into a shared folder, such as /tmp: the new
    contents must not become theirs.  Nor from what a symbolic link leads to, for anybody
    may have chosen that.
    """
    # What this host remembers as missing may have got a private mode on another one.
    if not exists_now(target):
        return
    try:
        other = os.lstat(target)
        folder = os.stat(os.path.dirname(target) or ".")
    except FileNotFoundError:
        return
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & (
        stat.S_IWGRP | stat.S_IWOTH
    )
    if stat.S_ISLNK(other.st_mode):
        return
    if shared and other.st_uid not in (os.geteuid(), folder.st_uid):
        return
    mode = stat.S_IMODE(other.st_mode)
    group = other.st_gid
    if not (_owned(descriptor, other.st_uid, group) or _owned(descriptor, -1, group)):
        # The group differs, so it must not get the old group's permissions.
        mode &= ~0o070
    names: list[str] = []
    # Some file systems have no extended attributes.
    with best_effort():
        names = os.listxattr(target)
    for name in names:
        # Capabilities belong to the old contents; the kernel drops them on a write too.
        if name != "security.capability":
            with best_effort():
                os.setxattr(descriptor, name, os.getxattr(target, name))
    # Some file systems have a fixed mode, and refuse even fchmod() to that mode.
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        os.fchmod(descriptor, mode)


def _owned(descriptor: int, user: int, group: int) -> bool:
    """Change a file's owner and group; return whether that is permitted."""
    now = os.fstat(descriptor)
    if user in (-1, now.st_uid) and group == now.st_gid:
        return True
    try:
        os.fchown(descriptor, user, group)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise
        return False
    return True
