"""What a file has besides its content: mode, owner, times, extended attributes."""

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

from nvmeio._native.file import File

ACCESS_LIST = "system.posix_acl_access"

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

    The umask belongs to the process: no other thread may make files meanwhile.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    # The mode is asked for, as the umask says nothing in a folder with a default access
    # control list.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    descriptor = os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)
    try:
        file = File(path, "r+", direct=direct)
        # Whoever may rename in the folder could have put a link to another in its place.
        if not os.path.samestat(os.fstat(descriptor), os.fstat(file.fileno())):
            file.close()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
    finally:
        os.close(descriptor)
    return file, umask


def give(descriptor: int, mode: int) -> list[str]:
    differs = stat.S_IMODE(os.fstat(descriptor).st_mode) != mode
    return ["mode"] if differs and not _granted(os.fchmod, descriptor, mode) else []


def give_access(descriptor: int, other: int | str, status: os.stat_result) -> list[str]:
    """Give a file the owner, the access control list and the mode of another."""
    refused = []
    mode = stat.S_IMODE(status.st_mode)
    if not _give_owner(descriptor, status):
        refused.append("owner")
        # Set-user-ID means the owner that it was set by.
        mode &= 0o777
    if not _give_list(descriptor, other):
        refused.append(ACCESS_LIST)
        # With a list they say what it allows at most; without, what the group may do.
        mode &= ~stat.S_IRWXG
    return refused + give(descriptor, mode)


def preserve(source: int, descriptor: int, status: os.stat_result) -> list[str]:
    """Give a file all that another one has."""
    refused = give_access(descriptor, source, status)
    for name in _extended(source):
        if not _granted(os.setxattr, descriptor, name, os.getxattr(source, name)):
            refused.append(name)
    os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
    return refused


def _give_list(descriptor: int, other: int | str) -> bool:
    """Give a file the access control list of another; False where that is refused."""
    try:
        wanted = os.getxattr(other, ACCESS_LIST)
    except OSError as error:
        if error.errno not in {*REFUSALS, errno.ENODATA, errno.ENOENT}:
            raise
    else:
        return _granted(os.setxattr, descriptor, ACCESS_LIST, wanted)
    try:
        # The default of its folder may have given it one.
        os.removexattr(descriptor, ACCESS_LIST)
    except OSError as error:
        if error.errno not in {*REFUSALS, errno.ENODATA}:
            raise
        # Where there are no lists, there is none.
        return error.errno not in (errno.EACCES, errno.EPERM)
    return True


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
    """Name the attributes that are the user's."""
    names: list[str] = []
    try:
        names = os.listxattr(descriptor)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
    return [name for name in names if name.startswith("user.")]


def _granted(change: Callable[..., None], *arguments: Any) -> bool:
    """Change something; False where the system refuses."""
    try:
        change(*arguments)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return False
    return True
