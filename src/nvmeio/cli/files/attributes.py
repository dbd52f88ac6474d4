"""What a file has besides its content: mode, owner, times, extended attributes."""

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

from nvmeio.file import File

__all__ = ["create_private", "give", "preserve"]

# The file system has no such thing or no room for it, or it takes other rights to set it.
REFUSALS = {
    errno.E2BIG,
    errno.EACCES,
    errno.EINVAL,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
}


def create_private(path: str, direct: Any) -> tuple[File, int]:
    """Make a file that nobody else can open yet.

    Parameters
    ----------
    path : str
        Must not exist.
    direct : bool or "auto"
        As for ``nvmeio.File``.

    Returns
    -------
    tuple of (File, int)
        Open for reading and writing; and the umask, for the mode that it shall have.

    Raises
    ------
    OSError
        With errno and path.

    Notes
    -----
    The umask belongs to the process: no other thread may make files meanwhile.
    """
    umask = os.umask(0o077)
    try:
        return File(path, "x", direct=direct), umask
    finally:
        os.umask(umask)


def give(descriptor: int, mode: int, owner: os.stat_result | None = None) -> list[str]:
    """Give a file its mode and, if wanted, an owner.

    Parameters
    ----------
    descriptor : int
        Of a file of this process's own.
    mode : int
        Permission bits.
    owner : os.stat_result, optional
        Of the file that has the owner and the group.

    Returns
    -------
    list of str
        What the system has refused.

    Raises
    ------
    OSError
        With errno.
    """
    refused = []
    if owner is not None and not _give_owner(descriptor, owner):
        refused.append("owner")
        # Set-user-ID means the owner that it was set by.
        mode &= 0o777
    differs = stat.S_IMODE(os.fstat(descriptor).st_mode) != mode
    if differs and not _granted(os.fchmod, descriptor, mode):
        refused.append("mode")
    return refused


def preserve(source: int, descriptor: int, status: os.stat_result) -> list[str]:
    """Give a file all that another one has.

    Parameters
    ----------
    source : int
        A descriptor of the other.
    descriptor : int
        Of a file of this process's own.
    status : os.stat_result
        What the other was before it was read.

    Returns
    -------
    list of str
        What the system has refused.

    Raises
    ------
    OSError
        With errno.
    """
    refused = give(descriptor, stat.S_IMODE(status.st_mode), status)
    for name in _extended(source):
        if not _granted(os.setxattr, descriptor, name, os.getxattr(source, name)):
            refused.append(name)
    os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
    return refused


def _give_owner(descriptor: int, owner: os.stat_result) -> bool:
    """Give a file an owner, or at least a group; False where that is not all."""
    status = os.fstat(descriptor)
    if (status.st_uid, status.st_gid) == (owner.st_uid, owner.st_gid):
        return True
    if _granted(os.fchown, descriptor, owner.st_uid, owner.st_gid):
        return True
    _granted(os.fchown, descriptor, -1, owner.st_gid)
    return False


def _extended(descriptor: int) -> list[str]:
    """Name the attributes that are the user's, and the access control list."""
    names: list[str] = []
    try:
        names = os.listxattr(descriptor)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
    return [
        name
        for name in names
        if name.startswith("user.") or name == "system.posix_acl_access"
    ]


def _granted(change: Callable[..., None], *arguments: Any) -> bool:
    """Change something; False where the system refuses."""
    try:
        change(*arguments)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return False
    return True
