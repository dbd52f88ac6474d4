"""Storage that checkpoints are copied to: a local folder, or a URL of fsspec."""

import contextlib
import errno
import functools
import importlib
import math
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any, Protocol

import numpy as np

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.types import Path
from nvmeio._files.descriptors import Descriptor, ask_anew
from nvmeio._files.folders import make_folders, sync_folder
from nvmeio._files.kinds import INDEX_NAME, INDEX_OF_RANK, METADATA, OF_RANK
from nvmeio._files.paths import absolute_folder, exists_now, refuse_url
from nvmeio._native.descriptor import TemporaryName
from nvmeio._native.file import File
from nvmeio._publish.claims import Claim, log_left, remove_if
from nvmeio._publish.files import new_file, show_use
from nvmeio._publish.names import (
    OwnerOf,
    is_of_living,
    owner_of,
    remove_left,
    rename,
    short_name,
    temporary_name,
)
from nvmeio._safetensors.turns import alone_in, remove_parts
from nvmeio._streams.memory import Bytes
from nvmeio._streams.reading import in_pieces
from nvmeio.default import default_handle

__all__ = ["Bytes", "Connection", "Folder", "Place", "Remote", "Writer"]
__all__ += ["above", "is_held", "local_path", "pieces_of", "place_of"]


PIECE_BYTES = 4 << 20

# Servers of SFTP and FTP close connections that are idle for some minutes.
IDLE_S_MAX = 60

# Protocols of stores whose folders are only parts of names.  All are safe to share between
# threads, and have a connection for each request.
_WITHOUT_FOLDERS = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}

# Of these, those which replace an object as a whole, once it is complete.
_ATOMIC = {"s3", "s3a", "gs", "gcs"}

# Of fsspec's file systems, those which list a folder as empty after an error of the server.
# They keep a list that was not an error.
_EMPTY_AFTER_ERRORS = {"ftp"}

# Modules of the clients of stores.  What they miss are no objects, which fsspec's file
# systems miss themselves.
_OF_CREDENTIALS = (
    "aiobotocore.",
    "azure.identity.",
    "botocore.",
    "gcsfs.credentials",
    "google.auth.",
)


_Check = Callable[[], None]


class Writer(Protocol):
    """A file that is being written, before it has its name."""

    def write(self, piece: Bytes) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Make all bytes durable."""

    def read(self) -> Generator[Bytes, None, None]:
        """Yield the bytes that are on the storage."""

    def commit(self) -> os.stat_result | None:
        """Give it its name; return its status before that, if the storage has one."""


class Place(Protocol):
    """Files below a folder, local or remote; names are relative, with slashes."""

    @property
    def replaced_at(self) -> str:
        """When a file takes the place of an older one: "open", "finish" or "commit"."""

    @property
    def root(self) -> str:
        """The folder's path or URL, for messages."""

    def free_bytes(self) -> int | None:
        """Return how many bytes are free; None if that is unknown."""

    def writing(self, name: str, mode: int) -> contextlib.AbstractContextManager[Writer]:
        """Write a file, which counts once it is committed.

        Nobody else has a right to it that is not in a mode; a store has its own rules.
        """

    def holding(
        self, name: str, mode: int, pause: Callable[[float], object]
    ) -> contextlib.AbstractContextManager[_Check | None]:
        """Keep others away that write what a file marks, or lose that to them.

        Yield what raises OSError if it is lost; None if nothing is held.  Raises OSError
        where no file can be made, as on a full drive.  `mode` is that of the file.  `pause`
        is called, with seconds, as long as another has to be waited for.
        """

    def abandon(self, name: str) -> None:
        """Remove a file that was not committed, after the last try."""

    def read(self, name: str) -> Generator[Bytes, None, None]:
        """Yield the bytes of a file, piece by piece."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None without one, -1 if it is a link."""

    def make(self, folder: str, mode: int) -> None:
        """Create a folder, with no right that is not in a mode, and those above it."""

    def settle(self, folder: str) -> None:
        """Make the names in a folder durable."""

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of a file, if it exists and the storage has one."""

    def clean(self, folder: str, names: Collection[str]) -> None:
        """Remove unfinished files: with these short names of dead processes, and all of
        those whose right was taken by holding().
        """

    def remove(self, name: str, check: _Check) -> None:
        """Remove a file, if it exists; not if `check` raises, which a folder can ask."""


def above(name: str) -> Iterator[str]:
    """Yield the folder of a file, and those above it."""
    while name:
        name = os.path.dirname(name)
        yield name


def is_held(name: str) -> bool:
    """Return whether a file marks those of one save, which excludes others."""
    base = os.path.basename(name)
    return base in (METADATA, INDEX_NAME) or OF_RANK.fullmatch(base) is not None


def local_path(target: Path) -> str | None:
    """Return the absolute path of a folder; None if the target is a URL of a store."""
    name = os.fsdecode(path_of(target))
    protocol, colon, rest = name.partition(":")
    if not colon or protocol not in ("file", "local"):
        if "://" in name:
            return None
        refuse_url("target", name, "pathlib has shortened it, so pass a str")
        return absolute_folder("target", name)
    path = rest.removeprefix("//")
    if not path.startswith("/"):
        raise ValueError(
            f"target is {name!r}; a path in a URL must be absolute, as in file:///folder"
        )
    return absolute_folder("target", path)


def place_of(target: Path) -> Place:
    """Return the Place of a path, or of a URL that fsspec supports."""
    name = os.fsdecode(path_of(target))
    protocol = name.partition("://")[0]
    if (path := local_path(target)) is not None:
        return Folder(path)
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{name!r} is a URL, which needs fsspec; run: pip install fsspec",
            name="fsspec",
        ) from None
    # Raises for unknown protocols now, because the first connection may come much later.
    fsspec.get_filesystem_class(protocol)
    # Otherwise fsspec would give the next copy a connection that the server has closed.
    options = {} if protocol in _WITHOUT_FOLDERS else {"skip_instance_cache": True}
    # For messages, which may be read by others.
    shown = re.sub(r"(://[^/:@]*):[^/]*@", r"\1:***@", name)
    connect = functools.partial(fsspec.core.url_to_fs, name, **options)
    return Remote(Connection(connect), shown)


def pieces_of(file: File, size: int) -> Generator[Bytes, None, None]:
    """Yield a file's bytes in order, while the next piece is being read."""
    return in_pieces(file, size, PIECE_BYTES, 2)


class Folder:
    """A folder of a mounted file system.

    With `shown`, it is the unfinished folder of that path, which messages name.
    """

    replaced_at = "commit"

    def __init__(self, path: str, shown: str | None = None) -> None:
        self._path, self.root = path, shown or path
        self._claims: dict[str, Claim] = {}
        # Where others have written, whose files may still be about to get their names.
        self._taken_over: dict[str, set[tuple[str, str, str] | None]] = {}
        self._names_of_claims: set[str] = set()

    def free_bytes(self) -> int:
        space = os.statvfs(self._path)
        return space.f_bavail * space.f_frsize

    def path(self, name: str) -> str:
        return os.path.join(self._path, name) if name else self._path

    @contextlib.contextmanager
    def writing(self, name: str, mode: int) -> Iterator[Writer]:
        if (claim := self._claims.get(name)) is not None:
            try:
                with (made := claim.opened()):
                    yield _ClaimWriter(claim, made)
            except OSError:
                claim.check()
                raise
            return
        temporary = TemporaryName(self.path(temporary_name(name)))
        with temporary as path, new_file(path, _mode(mode)) as file:
            yield _FolderWriter(file, temporary, path, self.path(name))

    @contextlib.contextmanager
    def holding(
        self, name: str, mode: int, pause: Callable[[float], object]
    ) -> Iterator[_Check | None]:
        checks: list[_Check] = []

        def require_held() -> None:
            for check in checks:
                check()

        with contextlib.ExitStack() as stack:
            # Nobody else writes to an unfinished folder.
            if self._path == self.root:
                folder, base = os.path.split(self.path(name))
                turn = alone_in(folder, base.removesuffix(INDEX_NAME), pause=pause)
                if base == INDEX_NAME:
                    checks.append(stack.enter_context(turn))
                # Ranks may copy at the same time.
                is_of_rank = INDEX_OF_RANK.fullmatch(base)
                with turn if is_of_rank else contextlib.nullcontext():
                    claim = self._claim(name, mode)
                stack.callback(claim.remove)
                stack.callback(self._claims.pop, name, None)
                checks.append(claim.check)
            yield require_held if checks else None

    def _claim(self, name: str, mode: int) -> Claim:
        claim = Claim(self.path(name), _mode(mode))
        folder, base = os.path.split(name)
        self._names_of_claims.add(os.path.basename(claim.path))
        if not base.endswith(INDEX_NAME):
            self._claims[name] = claim
        elif claim.displaced:
            prefix = base.removesuffix(INDEX_NAME)
            remove_parts(self.path(folder), prefix, self._names_of_claims)
        if claim.displaced and base != INDEX_NAME:
            self._taken_over.setdefault(folder, set()).update(claim.displaced)
        return claim

    def abandon(self, name: str) -> None:
        """Do nothing: a file without its name has gone at the end of writing()."""

    def read(self, name: str) -> Generator[Bytes, None, None]:
        with File(self.path(name)) as file:
            # The process that wrote it may have died before it synced it.
            os.fsync(file.fileno())
            yield from _read_anew(file)

    def size(self, name: str) -> int | None:
        path = self.path(name)
        try:
            # If this host remembers that it is missing, the marks of a copy would stay.
            if not exists_now(path):
                return None
            found = os.lstat(path)
        except FileNotFoundError:
            return None
        # A symbolic link is replaced, whatever it leads to: that may be the source itself.
        if stat.S_ISLNK(found.st_mode):
            return -1
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def make(self, folder: str, mode: int) -> None:
        path = self.path(folder)
        make_folders(os.path.dirname(path))
        make_folders(path, mode=mode & 0o777 | stat.S_IRWXU)

    def settle(self, folder: str) -> None:
        sync_folder(self.path(folder))

    def status(self, name: str) -> os.stat_result | None:
        path = self.path(name)
        # NFS remembers for seconds what a file is like.
        ask_anew(path)
        with contextlib.suppress(FileNotFoundError):
            return os.lstat(path)
        return None

    def clean(self, folder: str, names: Collection[str]) -> None:
        # What others still write could get its name, although they have lost that right.
        lost = [self._taken_over.get(each, set()) for each in (folder, *above(folder))]
        others = set().union(*lost)

        def is_mine(found: OwnerOf) -> bool:
            if found.string in self._names_of_claims:
                return False
            # Long names of files of two drains may have one short name.
            name = short_name(os.path.join(folder, found["name"]))
            if name in names and not is_of_living(found):
                return True
            # A folder is a step, whose writer has its own lock.
            is_file = os.path.isfile(os.path.join(self.path(folder), found.string))
            return is_file and owner_of(found.string) in others

        _, failed = remove_left(self.path(folder), is_mine, locked=bool(others))
        if failed is not None:
            log_left(failed)

    def remove(self, name: str, check: _Check) -> None:
        remove_if(check, [self.path(name)])


class _FolderWriter:
    def __init__(self, file: File, name: TemporaryName, path: str, target: str) -> None:
        self.file, self._name, self.unnamed, self.target = file, name, path, target
        self.written = 0

    def write(self, piece: Bytes) -> None:
        default_handle().write(piece, self.file, self.written)
        self.written += len(piece)

    def finish(self) -> None:
        default_handle().fsync(self.file)
        # If this fails, bytes may be missing.
        self.file.close()

    def read(self) -> Generator[Bytes, None, None]:
        with File(self.unnamed) as file:
            show_use(file)
            yield from _read_anew(file)

    def commit(self) -> os.stat_result:
        found = os.lstat(self.unnamed)
        rename(self.unnamed, self.target)
        self._name.keep()
        return found


class _ClaimWriter:
    """Fills the file of a claim, which becomes its target."""

    def __init__(self, claim: Claim, made: Descriptor) -> None:
        self._claim, self._made, self.target = claim, made, claim.target

    def write(self, piece: Bytes) -> None:
        left = piece.data
        while len(left):
            left = left[os.write(self._made.number, left) :]

    def finish(self) -> None:
        os.fsync(self._made.number)
        self._made.check_written()

    def read(self) -> Generator[Bytes, None, None]:
        with File(self._claim.path) as file:
            yield from _read_anew(file)

    def commit(self) -> None:
        self._claim.commit()


def _mode(mode: int) -> int:
    """Return the mode with which to create a file that gets no right but those of a mode.

    Not by fchmod(2), which a mount refuses whose files belong to another user.
    """
    return mode & 0o666 | 0o600


def _read_anew(file: File) -> Generator[Bytes, None, None]:
    """Yield the bytes on the device, not those in the page cache."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return pieces_of(file, file.size)


class Connection:
    """The file system of fsspec behind a URL, as each thread uses it."""

    def __init__(self, connect: Callable[[], tuple[Any, str]]) -> None:
        self._connect = connect
        # One for all threads, or for each its own, and when it was used.
        self._shared: dict[str, Any] = {}
        self._here = threading.local()

    def _found(self) -> tuple[Any, str]:
        # Not a cached_property: before Python 3.12 all objects share its lock, which a
        # store that does not answer would hold, and forked children would inherit.
        here, now = self._shared or self._here.__dict__, time.monotonic()
        if now - here.get("used", -math.inf) > IDLE_S_MAX:
            try:
                system, base = self._connect()
            except FileNotFoundError as error:
                # Of this host, such as a key for SFTP, and not the store's answer.
                raise OSError(errno.EREMOTEIO, str(error)) from error
            # Only these may be used by several threads: of SFTP, two would wait for ever
            # for answers that the other one has taken.
            if getattr(system, "async_impl", False):
                here = self._shared = {}
            here["found"] = system, base.rstrip("/")
        here["used"] = now
        found: tuple[Any, str] = here["found"]
        return found

    @contextlib.contextmanager
    def system(self) -> Iterator[Any]:
        """Yield the file system; after an error in the block, the next one is new."""
        try:
            yield self._found()[0]
        except Exception as error:
            known = _translated(error)
            if not isinstance(known, FileNotFoundError):
                self._forget()
            if known is error:
                raise
            raise known from error

    def _forget(self) -> None:
        # The server may have been restarted, or there are new credentials in a file.
        found = (self._shared or self._here.__dict__).get("found")
        self._shared = {}
        self._here.__dict__.clear()
        if found is not None:
            type(found[0]).clear_instance_cache()

    @property
    def base(self) -> str:
        """The URL's path."""
        return self._found()[1]


def _translated(error: Exception) -> Exception:
    """Return an error of a file system of fsspec as that of a local one would be."""
    if isinstance(error, FileNotFoundError):
        frames = traceback.walk_tb(error.__traceback__)
        modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
        if any(each.startswith(_OF_CREDENTIALS) for each in modules):
            # Of this host, such as a token, or a program that gives the credentials.
            return OSError(errno.EREMOTEIO, str(error))
        # As of FTP, where it follows anything that a server has said, such as being busy.
        of_ftp: Any = getattr(sys.modules.get("ftplib"), "Error", ())
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, of_ftp):
                # The last answer: servers without MLSD have refused that one before LIST.
                if str(cause).startswith(("450", "550")):
                    break
                return OSError(errno.EREMOTEIO, str(cause))
            cause = cause.__cause__ or cause.__context__
    elif getattr(error, "errno", None) == errno.ENOENT:
        # As of SMB, whose class is one of its own.
        return FileNotFoundError(errno.ENOENT, str(error))
    return error


class Remote:
    """A folder of a file system of fsspec, without locks and renames."""

    def __init__(self, connection: Connection, root: str, folder: str = "") -> None:
        self.root = root
        protocol = root.partition("://")[0]
        self.replaced_at = "finish" if protocol in _ATOMIC else "open"
        self._is_empty_after_errors = protocol in _EMPTY_AFTER_ERRORS
        self._connection, self._folder = connection, folder
        # The names of files that were finished, but not committed.
        self._unsure: set[str] = set()

    def path(self, name: str) -> str:
        return "/".join((self._connection.base, *filter(None, (self._folder, name))))

    def _shown(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}".rstrip("/")

    def below(self, name: str) -> "Remote":
        """Return a folder below this one."""
        folder = f"{self._folder}/{name}".lstrip("/")
        return Remote(self._connection, self._shown(name), folder)

    def free_bytes(self) -> None:
        return None

    def holding(
        self, name: str, mode: int, pause: Callable[[float], object]
    ) -> contextlib.AbstractContextManager[None]:
        """Do nothing: there are no locks."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def writing(self, name: str, mode: int) -> Iterator["_RemoteWriter"]:
        with self._connection.system() as system:
            before = self.size(name)
            writer = _RemoteWriter(self, name, system.open(self.path(name), "wb"))
            try:
                yield writer
            finally:
                writer.close()
                if writer.committed:
                    self._unsure.discard(name)
                elif writer.finished:
                    self._unsure.add(name)
                else:
                    with contextlib.suppress(Exception):
                        # SFTP and others keep a part of an unfinished file, and another
                        # drain may have written the whole meanwhile.
                        now = self.size(name)
                        if now is not None and now != before and now <= writer.given:
                            self.remove(name)

    def abandon(self, name: str) -> None:
        # A finished object has its name even if the bytes read back are wrong.  It is not
        # removed before the next try: a store may carry out a request when nobody waits
        # for its answer any longer, and the next try has written the object.
        if name in self._unsure:
            self._unsure.discard(name)
            with contextlib.suppress(Exception):
                self.remove(name)

    def read(self, name: str) -> Generator[Bytes, None, None]:
        with self._connection.system() as system, system.open(self.path(name)) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield np.frombuffer(piece, np.uint8)

    def beginning(self, name: str, nbytes: int) -> bytes:
        """Return how a file begins, in one request: others may replace it meanwhile."""
        with self._connection.system() as system:
            return bytes(system.cat_file(self.path(name), start=0, end=nbytes))

    def size(self, name: str) -> int | None:
        if self._is_empty_after_errors:
            # A name that is not in the list of its folder is missing.
            folder, _, last = name.rpartition("/")
            return self.sizes(folder).get(last)
        try:
            with self._connection.system() as system:
                system.invalidate_cache()
                found = system.info(self.path(name)).get("size")
        except FileNotFoundError:
            return None
        return None if found is None else int(found)

    def make(self, folder: str, mode: int) -> None:
        if self.root.partition("://")[0] not in _WITHOUT_FOLDERS:
            with self._connection.system() as system:
                system.makedirs(self.path(folder), exist_ok=True)

    def settle(self, folder: str) -> None:
        """Do nothing: remote storage makes names durable itself."""

    def status(self, name: str) -> None:
        return None

    def clean(self, folder: str, names: Collection[str]) -> None:
        """Do nothing: a file has its own name at once."""

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the names in a folder with the sizes of files, and None of folders.

        Not by find() or walk(), which take an error for an empty folder.
        """
        path = self.path(folder)
        try:
            with self._connection.system() as system:
                system.invalidate_cache()
                found = system.ls(path, detail=True)
                if not found and self._is_empty_after_errors:
                    lists = system.dircache
                    if lists.use_listings_cache and f"/{path.strip('/')}" not in lists:
                        words = "the server has not listed it; try again"
                        raise OSError(errno.EREMOTEIO, words, self._shown(folder))
        except FileNotFoundError:
            return {}
        return {
            each["name"].rstrip("/").rpartition("/")[2]: (
                None if each.get("type") == "directory" else each.get("size") or 0
            )
            for each in found
            # A store lists a file, and the object that stands for a folder, as itself.
            if each["name"].strip("/") != path.strip("/")
        }

    def names(self, folder: str) -> list[str]:
        return list(self.sizes(folder))

    def remove(self, name: str, check: _Check = lambda: None) -> None:
        # Not by rm(), which would treat brackets in a name as a pattern.
        try:
            with self._connection.system() as system:
                system.rm_file(self.path(name))
        except FileNotFoundError:
            pass
        except Exception:
            # FTP has an error of its own for a file that is not there.
            if self.size(name) is not None:
                raise

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder, where there are folders."""
        with contextlib.suppress(Exception), self._connection.system() as system:
            # For some file systems, such as those of pyarrow, it need not be empty.
            system.invalidate_cache()
            if not system.ls(self.path(name), detail=False):
                fsspec: Any = importlib.import_module("fsspec")
                remove, nothing = system.rmdir, fsspec.AbstractFileSystem.rmdir
                if getattr(remove, "__func__", None) is nothing:
                    # As with the package sshfs, whose rm() removes an empty folder.
                    remove = system.rm
                remove(self.path(name))


class _RemoteWriter:
    def __init__(self, place: Remote, name: str, stream: Any) -> None:
        self.place, self.name, self.target = place, name, place.path(name)
        self.stream = stream
        self.committed = self.finished = False
        self.given = 0

    def write(self, piece: Bytes) -> None:
        view = piece.data
        while len(view):
            # A raw stream may write fewer bytes than it was given.
            taken = self.stream.write(view)
            if taken is not None and not 0 < taken <= len(view):
                raise OSError(
                    errno.EIO,
                    f"write() of {len(view)} bytes returned {taken}",
                    self.target,
                )
            taken = len(view) if taken is None else taken
            self.given += taken
            view = view[taken:]

    def finish(self) -> None:
        self.finished = True
        try:
            self.stream.close()
        except BaseException:
            # It counts as closed, but a store keeps the parts of a large object, which no
            # listing shows, until the upload is abandoned.
            with contextlib.suppress(Exception):
                self.stream.discard()
            raise

    def read(self) -> Generator[Bytes, None, None]:
        return self.place.read(self.name)

    def commit(self) -> None:
        self.committed = True

    def close(self) -> None:
        """Abandon an unfinished upload; ignore errors, since one was raised already."""
        if self.stream.closed:
            return
        with contextlib.suppress(Exception):
            self.stream.discard()
        try:
            # Marked as closed, because close() would complete the upload.
            self.stream.closed = True
        except AttributeError:
            with contextlib.suppress(Exception):
                self.stream.close()
