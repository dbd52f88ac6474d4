"""Make paths absolute, name them in errors, and sync their directories."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.types import Path
from nvmeio._files.descriptors import FOLDER, ask_anew, contents_of, opened
from nvmeio._native.descriptor import TemporaryName

__all__ = [
    "absolute",
    "absolute_folder",
    "counts_links",
    "dangling",
    "exists",
    "exists_now",
    "has_name",
    "is_anothers",
    "is_strangers",
    "is_within",
    "leads_to",
    "mount_of",
    "naming",
    "refuse_url",
    "remove_now",
    "resolved",
]
__all__ += ["stat_of", "synced_folder"]


# str(pathlib.Path("s3://bucket/run")) is "s3:/bucket/run".
_SHORTENED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@contextlib.contextmanager
def synced_folder(path: str | bytes, *, follow: bool = True) -> Iterator[None]:
    """Open a file's directory, and sync it at the end of the block unless that raises.

    If the path is a link, this is the directory of the link's target; with ``follow=False``
    it is the link's own.
    """
    with naming(path):
        folder = os.path.dirname(resolved(path, follow=follow))
    if folder.startswith("/proc/"):
        # An open file, which has no name there that could be lost.
        yield
        return
    words = f" (its folder {folder!r}, to be synced)"
    with contextlib.ExitStack() as stack:
        with naming(path, words):
            descriptor = stack.enter_context(opened(folder, FOLDER))
        yield
        with naming(path, words):
            os.fsync(descriptor)


def absolute(path: Path) -> str | bytes:
    """Return an absolute path, which is valid in any working directory."""
    path = path_of(path)
    if os.path.isabs(path):
        return path
    folder = os.getcwdb() if isinstance(path, bytes) else os.getcwd()
    # Not normalized, because "link/../file" depends on where the link leads.
    return os.path.join(folder, path)  # type: ignore[arg-type]  # both are of one type


def absolute_folder(name: str, path: Path) -> str:
    """Return the absolute path of the argument `name`; refuse "", which names no folder."""
    found = os.fsdecode(path_of(path))
    if not found:
        raise ValueError(f"{name} is ''; it must be the path of a folder")
    return os.fsdecode(absolute(found))


def refuse_url(
    name: str,
    path: Path,
    words: str = "pass a local folder, and copy it with nvmeio.checkpoint.drain",
) -> None:
    """Raise ValueError for a URL, which would be taken for the name of a local folder.

    Also for one that pathlib.Path has shortened.
    """
    found = os.fsdecode(path_of(path))
    if "://" in found or _SHORTENED.match(found):
        raise ValueError(f"{name} is {found!r}, a URL; {words}")


def dangling(path: str) -> str | None:
    """Say where a symbolic link leads if there is nothing; None for anything else.

    The path, or a folder above it, is the link.
    """
    found = path
    while not os.path.lexists(found) and os.path.dirname(found) != found:
        found = os.path.dirname(found)
    if os.path.exists(found) or not os.path.islink(found):
        return None
    what = "it" if found == path else repr(found)
    return f"{what} is a symbolic link to {os.readlink(found)!r}, which does not exist"


@contextlib.contextmanager
def naming(path: str | bytes, words: str = "") -> Iterator[None]:
    """Add a path, and words, to every OSError of the system in the block."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            # A signal handler raised it.
            raise
        raise OSError(error.errno, f"{error.strerror}{words}", path) from error


def is_within(place: str) -> bool:
    """Return whether a relative path, which a file gave, stays inside its folder."""
    parts = place.split("/")
    try:
        os.fsencode(place)
    except UnicodeEncodeError:
        return False
    return bool(place) and "\0" not in place and not {"", ".", ".."} & set(parts)


def exists(path: str | bytes, *, follow: bool = False) -> bool:
    """Return whether a name exists.

    os.path.exists() and lexists() take each error, such as that of a server which does not
    answer, for no.
    """
    try:
        os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# What link(2) says of a folder whose new name does not exist.  Other errors are those of
# the look for the name.
_NO_LINK = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EACCES, errno.EROFS, errno.EXDEV),
    *(errno.EMLINK, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP),
    errno.EOVERFLOW,  # of an idmapped mount, where the folder's owner has no number
)


def exists_now(path: str) -> bool:
    """Return whether a name exists, even if this host remembers that it does not.

    FUSE and NFS keep for a while that a name was not there.  NFS forgets it where the
    folder has changed.  Of FUSE, the kernel asks again to make a link, which is never made
    to a folder.  The dot makes sure that it is one, not a symbolic link, which could be
    linked.
    """
    if exists(path):
        return True
    folder = os.path.dirname(path) or "."
    if not exists(folder) and not (folder != path and exists_now(folder)):
        return False
    ask_anew(folder)
    if exists(path):
        return True
    try:
        os.link(os.path.join(folder, "."), path)
    except FileExistsError:
        return True
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise OSError(error.errno, error.strerror, path) from error
    return True


def remove_now(path: str) -> None:
    """Remove a file if it exists, even if this host remembers that it does not."""
    with contextlib.suppress(FileNotFoundError):
        if exists_now(path):
            os.unlink(path)


def leads_to(path: str | bytes, descriptor: int, *, follow: bool = True) -> bool:
    """Return whether a path leads to an open file or folder."""
    try:
        there = os.stat(path, follow_symlinks=follow)
        if (here := stat_of(descriptor)) is None:
            return False
        if os.path.samestat(there, here):
            return True
        # Some FUSE file systems give a file another inode number each time.
        flags = os.O_PATH if follow else os.O_PATH | os.O_NOFOLLOW
        with opened(path, flags) as found:
            return _place_of(found) == _place_of(descriptor)
    except FileNotFoundError:
        # Or there is no /proc.
        return False


# What fstat(2) says where another host of NFS has removed the file, or a FUSE server died.
_GONE = (errno.ESTALE, errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN)


def stat_of(descriptor: int) -> os.stat_result | None:
    """Return the status of an open file; None if no name can lead to it any more."""
    try:
        return os.fstat(descriptor)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None


def has_name(descriptor: int) -> bool:
    """Return whether an open file still has the name by which it was opened."""
    return not os.readlink(f"/proc/self/fd/{descriptor}").endswith(" (deleted)")


def _place_of(descriptor: int) -> tuple[int, str]:
    # The kernel adds " (deleted)" to the path of what has lost its name.
    return mount_of(descriptor), os.readlink(f"/proc/self/fd/{descriptor}")


def mount_of(descriptor: int) -> int:
    """Return the number of the mount that an open file is on."""
    # Of bytes: a process that dropped its privileges may be unable to import a codec.
    path = f"/proc/self/fdinfo/{descriptor}"
    found = contents_of(path).partition(b"mnt_id:")[2].split()
    if not found:
        # As in gVisor before April 2026: as without /proc, it is unknown.
        raise FileNotFoundError(errno.ENOENT, "it has no mnt_id", path)
    return int(found[0])


def resolved(path: str | bytes, *, follow: bool = True) -> str:
    """Follow the links of a path as the kernel does; the file need not exist.

    With ``follow=False``, do not follow a link at the end of the path.  In a folder like
    /tmp, PermissionError is raised for a link of another user than the folder's and this
    one, as open(2) does under fs.protected_symlinks.
    """
    found = os.fsdecode(path)
    if not os.path.isabs(found):
        found = os.path.join(os.getcwd(), found)
    for _ in range(40):
        folder, name = os.path.split(found)
        if name in ("", os.curdir, os.pardir):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        folder = os.path.realpath(folder, strict=True)
        found = os.path.join(folder, name)
        if not follow or not os.path.islink(found) or folder.startswith("/proc/"):
            return found
        _check_owner(found, folder, path)
        found = os.path.join(folder, os.readlink(found))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _check_owner(link: str, folder: str, path: str | bytes) -> None:
    """Refuse a link that another user may have planted: proc_sys_fs(5)."""
    if is_strangers(link, folder):
        words = "a symbolic link of another user, in a folder where anybody may make one"
        raise PermissionError(errno.EACCES, words, path)


def is_strangers(path: str, folder: str) -> bool:
    """Return whether another user may have planted a name in a folder such as /tmp.

    Anybody may make names there, and the owner is neither this user nor the folder's.
    """
    sticky = stat.S_ISVTX | stat.S_IWOTH
    if os.stat(folder).st_mode & sticky != sticky or not is_anothers(path, folder):
        return False
    try:
        return os.lstat(path).st_uid != _user_in(folder)
    except FileNotFoundError:
        return False


# By device and user, the owner of what this process makes there.
_made: dict[tuple[int, int], os.stat_result] = {}


def _user_in(folder: str) -> int:
    """Return the owner that a new file of this process has in a folder.

    NFS, as root_squash says, and others such as sshfs make it another user than this one.
    """
    made = _made_in(folder)
    return os.geteuid() if made is None else made.st_uid


def counts_links(folder: str) -> bool:
    """Return whether the file system counts names of files; some in user space do not."""
    made = _made_in(folder)
    return made is None or made.st_nlink > 0


def _made_in(folder: str) -> os.stat_result | None:
    """Return what a new file of this process is like in a folder; None if none can be."""
    key = os.stat(folder).st_dev, os.geteuid()
    if key not in _made:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        name = os.path.join(folder, f".nvmeio-{os.urandom(8).hex()}.tmp")
        try:
            with TemporaryName(name), opened(name, flags) as made:
                _made[key] = os.fstat(made)
        except OSError as error:
            if error.errno is None:
                # A signal handler raised it.
                raise
            return None
    return _made[key]


def is_anothers(path: str, folder: str) -> bool:
    """Return whether a name belongs to neither this user nor the folder's owner."""
    try:
        return os.lstat(path).st_uid not in (os.geteuid(), os.stat(folder).st_uid)
    except FileNotFoundError:
        return False
