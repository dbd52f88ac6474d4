"""Copy what a file has besides its contents: mode, owner, times, extended attributes."""

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

from nvmeio._native.file import File

ACCESS_LIST = "system.posix_acl_access"

# The file system does not support the attribute or has no space for it, or permission is
# missing.
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
    """Create a file that no other user can open yet.

    Changes the umask, which is the process's: no other thread may create files meanwhile.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    # Pass the mode too, because the umask has no effect in a directory with a default
    # access control list.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    descriptor = os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)
    try:
        file = File(path, "r+", direct=direct)
        # Another user with write permission for the directory may have replaced the file.
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
    """Copy owner, access control list and mode to a file; return what was refused."""
    refused = []
    mode = stat.S_IMODE(status.st_mode)
    if not _give_owner(descriptor, status):
        refused.append("owner")
        # Set-user-ID was meant for the old owner.
        mode &= 0o777
    if not _give_list(descriptor, other):
        refused.append(ACCESS_LIST)
        # With an access control list, the group bits are its mask: without the list, they
        # would grant that to the group.
        mode &= ~stat.S_IRWXG
    return refused + give(descriptor, mode)


def preserve(source: int, descriptor: int, status: os.stat_result) -> list[str]:
    """Copy all attributes of a file to another; return what was refused."""
    refused = give_access(descriptor, source, status)
    for name in _extended(source):
        if not _granted(os.setxattr, descriptor, name, os.getxattr(source, name)):
            refused.append(name)
    os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
    return refused


def _give_list(descriptor: int, other: int | str) -> bool:
    """Copy the access control list of a file; return False if that is refused."""
    try:
        wanted = os.getxattr(other, ACCESS_LIST)
    except OSError as error:
        if error.errno not in {*REFUSALS, errno.ENODATA, errno.ENOENT}:
            raise
    else:
        return _granted(os.setxattr, descriptor, ACCESS_LIST, wanted)
    try:
        # Remove a list that the file got from its directory's default.
        os.removexattr(descriptor, ACCESS_LIST)
    except OSError as error:
        if error.errno not in {*REFUSALS, errno.ENODATA}:
            raise
        # Other errors mean that there is no list, as wanted.
        return error.errno not in (errno.EACCES, errno.EPERM)
    return True


def _give_owner(descriptor: int, owner: os.stat_result) -> bool:
    """Set a file's owner and group, or only the group; return whether both are set."""
    status = os.fstat(descriptor)
    if (status.st_uid, status.st_gid) == (owner.st_uid, owner.st_gid):
        return True
    if _granted(os.fchown, descriptor, owner.st_uid, owner.st_gid):
        return True
    _granted(os.fchown, descriptor, -1, owner.st_gid)
    return False


def _extended(descriptor: int) -> list[str]:
    """Return the names of the user's extended attributes."""
    names: list[str] = []
    try:
        names = os.listxattr(descriptor)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
    return [name for name in names if name.startswith("user.")]


def _granted(change: Callable[..., None], *arguments: Any) -> bool:
    """Call ``change``; return False if the system refuses."""
    try:
        change(*arguments)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return False
    return True
