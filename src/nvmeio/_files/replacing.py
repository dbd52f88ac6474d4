"""Files that take another's place when they are complete."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from nvmeio._files.descriptors import FOLDER, opened
from nvmeio._files.paths import resolved

__all__ = ["become_like", "is_replaceable", "link", "replacement"]


def is_replaceable(path: str | bytes) -> bool:
    """Tell whether another file may take the place of what a path leads to."""
    try:
        target = resolved(path)
        found = os.stat(path)
    except FileNotFoundError:
        # Its folder may be missing too, which opening it tells.
        return os.path.isdir(os.path.dirname(os.path.abspath(os.fsdecode(path))))
    except OSError:
        # Opening it tells what.
        return False
    # A link of the kernel's to an open file is no name of it.
    of_kernel = target.startswith("/proc/")
    plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not of_kernel
    return plain and not _is_mounted(target)


def _is_mounted(target: str) -> bool:
    """Tell whether a file is a mount of its own, as containers have: none replaces it."""
    try:
        return _mount_of(target) != _mount_of(os.path.dirname(target) or ".")
    except (OSError, ValueError):
        # There is no /proc, or it went meanwhile.
        return False


def _mount_of(path: str) -> int:
    # As bytes: a process that gave up its rights may no longer import an encoding.
    with (
        opened(path, os.O_PATH) as descriptor,
        open(f"/proc/self/fdinfo/{descriptor}", "rb") as file,
    ):
        return int(file.read().split(b"mnt_id:")[1].split()[0])


@contextlib.contextmanager
def replacement(target: str, *, overwrite: bool = True) -> Iterator[str]:
    """Name a file beside another, whose place it takes if all goes well.

    With ``overwrite=False`` there must be no other, and none that has come meanwhile.
    """
    # Of a length of its own: a name that is long already has no room for a suffix.
    name = f".nvmeio-{os.urandom(8).hex()}.tmp"
    temporary = os.path.join(os.path.dirname(target), name)
    try:
        yield temporary
        (os.replace if overwrite else _rename_to_new)(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def become_like(descriptor: int, target: str) -> None:
    """Take over mode, owner and attributes of a file, as far as that is allowed."""
    try:
        other = os.stat(target)
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(other.st_mode)
    group = other.st_gid
    if not (_owned(descriptor, other.st_uid, group) or _owned(descriptor, -1, group)):
        # What the group might do is not for another group.
        mode &= ~0o070
    names: list[str] = []
    # There are file systems without any.
    with contextlib.suppress(OSError):
        names = os.listxattr(target)
    for name in names:
        # Capabilities were given to the old bytes; the kernel drops them at a write, too.
        if name != "security.capability":
            with contextlib.suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(target, name))
    # Some file systems know no other mode, and refuse this even for the one they have.
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        os.fchmod(descriptor, mode)


def _owned(descriptor: int, user: int, group: int) -> bool:
    """Give a file to an owner; tell whether that is allowed."""
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
        # With a folder Python calls linkat(2), which follows the link that is there.
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)


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
