"""Temporary names, which say whose they are, and the removal of what has died with them."""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator

from nvmeio._files.descriptors import contents_of, opened
from nvmeio._files.locks import is_locked
from nvmeio._files.paths import exists, is_anothers, is_strangers, naming
from nvmeio._native.descriptor import TemporaryName, is_in_use, remove_tree

__all__ = ["ASIDE", "FILE_NAME_MAX", "KEEPS_NAME", "OwnerOf", "is_aside"]
__all__ += [
    "final_name",
    "give_back",
    "is_dead",
    "is_left",
    "is_of_living",
    "owner_of",
    "remove_left",
    "rename",
    "renaming",
    "replacement",
    "short_name",
    "temporary_name",
]

# What says whose a temporary name is.
OwnerOf = re.Match[str]

# The name of what is not complete: its final name, and the process that makes it.
_LEFT = re.compile(
    r"\.(?P<name>.*)\.(?P<host>[^./]*)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}"
    r"\.nvmeio-(?P<kind>tmp|old)",
    re.DOTALL,
)
# Files of version 0.2 do not say whose they are; this long unchanged, they are nobody's.
_NOBODYS = re.compile(r"\.nvmeio-[0-9a-f]{16}\.tmp")
_NOBODYS_AGE_S = 86400
# One of a copy.
_COPIED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.nvmeio-part", re.DOTALL)
# For the name and the host; the whole name may have at most 255 bytes.
_NAME_MAX = 80

# The bytes of a name, NAME_MAX in limits.h.
FILE_NAME_MAX = 255

# Errors of renaming what can be removed nevertheless: a folder in a lower layer of
# overlayfs, and anything on a full btrfs, where a new name takes space.
KEEPS_NAME = (errno.EXDEV, errno.ENOSPC, errno.EDQUOT)

# The kind of a folder that has left its name for the new one, and may have to return.
ASIDE = "old"


def temporary_name(target: str, kind: str = "tmp") -> str:
    """Return a name beside `target` for what will be renamed to it, or was.

    What was set aside may get its name back, so that has the whole name.
    """
    folder, short = os.path.split(target if kind == ASIDE else short_name(target))
    process = os.getpid()
    words = f"{_host()}-{process}-{_start_of(process)}-{os.urandom(4).hex()}"
    return os.path.join(folder, f".{short}.{words}.nvmeio-{kind}")


def is_aside(name: str) -> bool:
    """Return whether a name is that of what was set aside."""
    return name.endswith(f".nvmeio-{ASIDE}") and _LEFT.fullmatch(name) is not None


def short_name(path: str) -> str:
    """Return a path whose name is as short as it is in temporary names."""
    folder, name = os.path.split(path)
    short = name[:_NAME_MAX]
    while len(os.fsencode(short)) > _NAME_MAX:
        short = short[:-1]
    return os.path.join(folder, short)


def final_name(name: str) -> str | None:
    """Return the short final name in a temporary one; None if `name` is not temporary."""
    found = _LEFT.fullmatch(name) or _COPIED.fullmatch(name)
    return short_name(found["name"]) if found else None


@contextlib.contextmanager
def replacement(target: str, check: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Yield the name of a temporary file, which then replaces `target`.

    After an error, such as one that `check` raises before that, the temporary file is
    removed.
    """
    temporary = TemporaryName(temporary_name(target))
    with temporary as path:
        yield path
        check()
        remedy = (
            "with atomic=False, write_file, save, torch.save and save_file write in place"
        )
        rename(path, target, f"; {remedy}", check)
        temporary.keep()


def rename(
    path: str, target: str, remedy: str = "", check: Callable[[], None] = lambda: None
) -> None:
    """Rename a file to what it replaces; say so if the file system cannot.

    If another has removed it, `check` raises why.
    """
    try:
        with renaming(target, remedy):
            os.replace(path, target)
    except FileNotFoundError:
        check()
        raise


@contextlib.contextmanager
def renaming(target: str, remedy: str = "") -> Iterator[None]:
    """Name the target in errors of renaming, and say if the file system cannot rename."""
    try:
        yield
    except OSError as error:
        words = str(error.strerror)
        if error.errno == errno.EXDEV:
            words += " (overlayfs cannot rename a folder of a lower layer, as of an image: "
            words += "write to another folder)"
        elif error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            words += f" (this file system cannot rename{remedy})"
        if error.errno is not None:
            raise OSError(error.errno, words, target) from error
        # A signal handler raised it.
        raise


def _host() -> str:
    """Return this host's name as it is in temporary names, without dots."""
    return re.sub("[^A-Za-z0-9-]", "_", os.uname().nodename)[:_NAME_MAX]


def _start_of(process: int) -> int:
    """Return a process's start time, in clock ticks since boot; -1 if it is dead.

    Without /proc it is 0: unknown.
    """
    try:
        # The process's name, in parentheses, may have any characters.
        words = contents_of(f"/proc/{process}/stat").rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1 if os.path.exists("/proc/self/stat") else 0
    return -1 if words[0] in b"ZX" else int(words[19])


def owner_of(name: str) -> tuple[str, str, str] | None:
    """Return the host, process and start of a temporary name; None of other names."""
    found = _LEFT.fullmatch(name)
    return found and (found["host"], found["pid"], found["start"])


def is_dead(found: OwnerOf) -> bool:
    """Return whether the process of a temporary name ran on this host and is dead."""
    then, now = int(found["start"]), _start_of(int(found["pid"]))
    return _host() == found["host"] and (now < 0 or (now != then and 0 not in (now, then)))


def is_of_living(found: OwnerOf) -> bool:
    """Return whether the process of a temporary name runs on this host."""
    return _host() == found["host"] and not is_dead(found)


def is_left(found: OwnerOf) -> bool:
    """Return whether a temporary name is of this process, and nothing uses it any more."""
    process = os.getpid()
    wanted = (_host(), process, _start_of(process))
    own = (found["host"], int(found["pid"]), int(found["start"])) == wanted
    return own and not is_in_use(found.string)


def remove_left(
    folder: str, chosen: Callable[[OwnerOf], bool], *, locked: bool = False
) -> tuple[list[str], OSError | None]:
    """Remove what has temporary names and is not locked; return paths and the first error.

    With `locked`, remove also what is.  What was set aside for a new one that did not come
    gets its name back.  What another user may have planted stays.
    """
    removed, failed = [], None
    for entry in os.scandir(folder):
        found = _LEFT.fullmatch(entry.name)
        if not (chosen(found) if found else _is_nobodys(entry)):
            continue
        try:
            if is_strangers(entry.path, folder):
                continue
            if _remove(entry.path, found, locked=locked):
                removed.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EACCES or not is_anothers(entry.path, folder):
                failed = failed or error
    try:
        return removed, failed
    finally:
        # Its traceback has this frame.
        del failed


def give_back(path: str, target: str) -> None:
    """Give what was set aside its name back, unless another has it now."""
    with contextlib.suppress(FileNotFoundError):
        try:
            with contextlib.suppress(FileExistsError):
                os.link(path, target, follow_symlinks=False)
        except OSError as error:
            if error.errno in (None, errno.ENOENT):
                raise
            # A folder, or any file where they have one name only.  Imported late, because
            # ``import nvmeio`` needs it for nothing else.
            from nvmeio._native.system_calls import rename_to_new

            with contextlib.suppress(FileExistsError):
                rename_to_new(path, target)
        else:
            # A folder stays for the next writer, beside another that has its name.
            with contextlib.suppress(IsADirectoryError):
                os.unlink(path)


def _is_nobodys(entry: "os.DirEntry[str]") -> bool:
    if not (_NOBODYS.fullmatch(entry.name) or _COPIED.fullmatch(entry.name)):
        return False
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISREG(found.st_mode) and found.st_mtime < time.time() - _NOBODYS_AGE_S


def _remove(path: str, found: OwnerOf | None, *, locked: bool) -> bool:
    """Remove a file or folder, or give it its name back; return whether it was removed."""
    mode = os.lstat(path).st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        return False
    with (
        naming(path),
        opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor,
    ):
        # A file that has another name, such as that of a lock, is not lost with this one.
        is_only = not stat.S_ISREG(mode) or os.fstat(descriptor).st_nlink < 2
        if is_only and not locked and is_locked(descriptor):
            return False
        if found and found["kind"] == ASIDE:
            target = os.path.join(os.path.dirname(path), found["name"])
            if not exists(target):
                give_back(path, target)
                return False
        if stat.S_ISDIR(mode):
            _remove_folder(path, found["name"] if found else "")
        else:
            os.unlink(path)
    return True


def _remove_folder(path: str, name: str) -> None:
    """Remove a folder, whose name goes first: who has made it may still be about to use it.

    It would get half of it if this process died meanwhile.
    """
    gone = temporary_name(os.path.join(os.path.dirname(path), name))
    try:
        os.rename(path, gone)
    except OSError as error:
        if error.errno not in KEEPS_NAME:
            raise
        gone = path
    remove_tree(gone)
