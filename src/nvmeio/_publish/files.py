"""Files that get their names, and replace others, when they are complete."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.types import Path
from nvmeio._files.descriptors import FOLDER, ask_anew, best_effort, cut, opened
from nvmeio._files.locks import is_locked
from nvmeio._files.paths import exists, leads_to, mount_of, naming, resolved, synced_folder
from nvmeio._native.descriptor import TemporaryName
from nvmeio._native.file import File, open_for_writing, open_unnamed, owned
from nvmeio._publish.attributes import become_like
from nvmeio._publish.names import replacement, temporary_name

__all__ = ["new_contents", "new_empty", "new_file", "replace_file"]
__all__ += ["show_use", "unnamed_file"]


@contextlib.contextmanager
def new_contents(
    path: str | bytes,
    *,
    sync: bool,
    atomic: bool = True,
    follow: bool = True,
    read_only: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Iterator[File]:
    """Open a file for new contents; the caller fills, truncates and syncs it.

    With `atomic` it is a new file, which replaces what `path` leads to at the end of the
    block unless that raises.  What cannot be replaced is opened as it is: a device, a
    mounted file, an open file in /proc.  With ``follow=False``, a symbolic link is
    replaced, not the file that it leads to.  A file that this user may not write to is
    replaced only with `read_only`.  `check` raises if the file must not be replaced any
    more; it is called when the new one has a temporary name, which another may remove.
    """
    with synced_folder(path, follow=follow) if sync else contextlib.nullcontext():
        target = _replaceable(path, follow=follow) if atomic else None
        if target is None:
            with open_for_writing(path) as file:
                yield file
            return
        with naming(path), _in_place_of(target, read_only=read_only, check=check) as file:
            yield file


@contextlib.contextmanager
def _in_place_of(
    target: str, *, read_only: bool, check: Callable[[], None]
) -> Iterator[File]:
    """Open a new file, which replaces `target` at the end of the block.

    Until then it has no name, so that a killed process leaves nothing behind.  If `target`
    is a symbolic link, the new file does not get the mode of what that leads to.
    """
    is_link = os.path.islink(target)
    is_old = not is_link and exists(target)
    if is_old and not read_only and not os.access(target, os.W_OK, effective_ids=True):
        # Opening it says why, such as EROFS, or EPERM of chattr +i.
        opened(target, os.O_WRONLY).close()
    try:
        _check_proc()
        file = _in_folder(lambda: open_unnamed(os.path.dirname(target)))
    except OSError as error:
        if error.errno not in _UNNAMED_UNKNOWN:
            raise
        with (
            replacement(target, check) as temporary,
            _in_folder(lambda: new_file(temporary, 0o600 if is_old else 0o666)) as file,
        ):
            if not is_link:
                become_like(file.fileno(), target)
            yield file
        return
    with file:
        # Before the bytes are written, so that the caller's sync covers the mode too.
        if not is_link:
            become_like(file.fileno(), target)
        yield file
        with replacement(target, check) as temporary:
            link(file.fileno(), temporary)
            # If this fails, bytes may be missing.
            file.close()


def replace_file(
    buffer: Any,
    path: Path,
    *,
    sync: bool,
    read_only: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Give a file new contents, as a whole; with ``sync=False``, nothing is synced.

    A file that this user may not write to is replaced only with `read_only`, as one that
    belongs to others that are replaced so.  `check` is as for ``new_contents``.
    """
    options: Any = {"sync": sync, "read_only": read_only, "check": check}
    with new_contents(path_of(path), **options) as file:
        cut(file, file.write(buffer))
        if sync:
            file.fsync()


# How often a file is made anew that another host has removed.
_TRIES = 10
# The file system has no O_TMPFILE, or no files open for reading and writing.
_UNNAMED_UNKNOWN = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)


def _check_proc() -> None:
    """Refuse a file without a name if it cannot get one: see link()."""
    if not os.path.isdir("/proc/self/fd"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def new_file(path: str, mode: int = 0o666) -> File:
    """Create a file with a temporary name, and no right that is not in a mode.

    Until it is locked, another host may remove it, as one that a dead process has left.
    """
    for _ in range(_TRIES):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with opened(path, flags, mode) as made, contextlib.ExitStack() as stack:
            try:
                file = open_for_writing(path)
                stack.callback(file.close)
                is_locked_here = show_use(file)
                ask_anew(os.path.dirname(path) or ".")
                if is_locked_here and leads_to(path, made):
                    stack.pop_all()
                    return file
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    raise OSError(errno.ESTALE, f"it was removed {_TRIES} times while it was made", path)


def new_empty(path: str, mode: int) -> None:
    """Create an empty file, with no right that is not in a mode."""
    opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode).close()


def unnamed_file(folder: str) -> File:
    """Create a file without a name, for reading and writing."""
    try:
        return open_unnamed(folder)
    except OSError as error:
        if error.errno not in _UNNAMED_UNKNOWN:
            raise
    # Create a named file, and remove its name.
    with TemporaryName(temporary_name(os.path.join(folder, "unnamed"))) as path:
        new_empty(path, 0o600)
        return owned(File(path, "r+"))


def show_use(file: File) -> bool:
    """Lock a file with a temporary name, whose process may be unknown in other containers.

    ``remove_left`` leaves it alone.  Return False if another has locked it, to remove it.
    """
    with best_effort():
        return not is_locked(file.fileno())
    return True


def _in_folder(create: Callable[[], File]) -> File:
    """Create a file; explain a PermissionError, which is about its directory."""
    try:
        return create()
    except PermissionError as error:
        words = f"{error.strerror} (its folder, in which a new file must be created)"
        raise PermissionError(error.errno, words, error.filename) from error


def _replaceable(path: str | bytes, *, follow: bool) -> str | None:
    """Return the path of what a new file may replace, or None: then open the path."""
    try:
        with naming(path):
            target = resolved(path, follow=follow)
    except IsADirectoryError:
        # Opening it says what the kernel calls it.
        return None
    if not follow and os.path.islink(target):
        return target
    with naming(path):
        # In here: a traceback through naming() would keep the caller's buffer alive in a
        # Python without the GIL, until the garbage collector runs.
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return target
    # /proc/PID/fd/N leads to an open file, but is not its name.
    plain = stat.S_ISREG(found.st_mode) and not target.startswith("/proc/")
    return target if plain and not _is_mounted(target) else None


def _is_mounted(target: str) -> bool:
    """Return whether a file is a mount point, as in containers: it cannot be replaced."""
    try:
        with (
            opened(target, os.O_PATH) as file,
            opened(os.path.dirname(target), os.O_PATH) as folder,
        ):
            return mount_of(file) != mount_of(folder)
    except OSError as error:
        if error.errno is None:
            raise
        # There is no /proc, or the file was removed meanwhile.
        return False


def link(descriptor: int, path: str) -> None:
    """Give a file a name."""
    with opened("/proc/self/fd", FOLDER) as folder:
        # With src_dir_fd Python calls linkat(2), which follows the link in /proc/self/fd.
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
