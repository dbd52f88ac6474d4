"""Files that replace another when they are complete."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from nvmeio._files.descriptors import FOLDER, best_effort, opened
from nvmeio._files.paths import resolved
from nvmeio._native.descriptor import TemporaryName

__all__ = ["become_like", "is_replaceable", "link", "replacement"]


def is_replaceable(path: str | bytes) -> bool:
    """Return whether a new file may replace the one that a path leads to."""
    try:
        target = resolved(path)
        found = os.stat(path)
    except FileNotFoundError:
        # If the directory is missing too, opening the file reports it.
        return os.path.isdir(os.path.dirname(os.path.abspath(os.fsdecode(path))))
    except OSError as error:
        if error.errno is None:
            raise
        # Opening the file reports the error.
        return False
    # /proc/PID/fd/N leads to an open file, but is not its name.
    of_kernel = target.startswith("/proc/")
    plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not of_kernel
    return plain and not _is_mounted(target)


def _is_mounted(target: str) -> bool:
    """Return whether a file is a mount point, as in containers: it cannot be replaced."""
    try:
        return _mount_of(target) != _mount_of(os.path.dirname(target) or ".")
    except OSError as error:
        if error.errno is None:
            raise
        # There is no /proc, or the file was removed meanwhile.
        return False


def _mount_of(path: str) -> int:
    # Read bytes: a process that dropped its privileges may be unable to import a codec.
    with (
        opened(path, os.O_PATH) as descriptor,
        open(f"/proc/self/fdinfo/{descriptor}", "rb") as file,
    ):
        return int(file.read().partition(b"mnt_id:")[2].split()[0])


@contextlib.contextmanager
def replacement(target: str) -> Iterator[str]:
    """Yield the name of a temporary file, which then replaces `target`.

    After an error, the temporary file is removed.
    """
    # Not derived from the target's name, which may be too long for a suffix.
    name = f".nvmeio-{os.urandom(8).hex()}.tmp"
    temporary = TemporaryName(os.path.join(os.path.dirname(target), name))
    with temporary as path:
        yield path
        os.replace(path, target)
        temporary.keep()


def become_like(descriptor: int, target: str) -> None:
    """Copy mode, owner and attributes from a file, as far as permitted."""
    try:
        other = os.stat(target)
    except FileNotFoundError:
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


def link(descriptor: int, path: str) -> None:
    """Give a file a name."""
    with opened("/proc/self/fd", FOLDER) as folder:
        # With src_dir_fd Python calls linkat(2), which follows the link in /proc/self/fd.
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
