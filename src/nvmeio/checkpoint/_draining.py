"""Copy folders to other storage in the background, verified, the `last` files last."""

import contextlib
import errno
import fnmatch
import functools
import math
import os
import re
import stat
import threading
import time
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Set
from concurrent.futures import CancelledError, Future

import crc32c
import numpy as np

from nvmeio._arguments.checks import shown, whole
from nvmeio._arguments.types import Path
from nvmeio._arguments.units import needed_and_free
from nvmeio._files.descriptors import ask_anew
from nvmeio._files.kinds import MANIFEST, METADATA, OF_RANK, TENSORS
from nvmeio._files.paths import absolute_folder, exists_now, refuse_url
from nvmeio._files.times import ambiguous_s
from nvmeio._native.file import File
from nvmeio._publish.names import short_name
from nvmeio._safetensors.places import INDEX_NAME, NUMBERED, REPLACING
from nvmeio._safetensors.replacing import require_whole
from nvmeio._safetensors.turns import LOCK
from nvmeio._tensors.errors import SafetensorError
from nvmeio.checkpoint._errors import CheckpointError
from nvmeio.checkpoint._futures import DRAINING, ToldFuture, start_thread
from nvmeio.checkpoint._manifest import (
    BLOCK_BYTES,
    TREE,
    Checksums,
    Manifest,
    Record,
    require_same,
)
from nvmeio.checkpoint._places import (
    Bytes,
    Place,
    above,
    is_held,
    pieces_of,
    place_of,
)

__all__ = ["Drain", "drain"]

# How many files are copied at once.
FILES = 4
RETRIES_MAX = 1000
# How often the source is listed anew if it changes meanwhile.
_LISTS_MAX = 10
# Pause before a retry; it doubles each time, up to the maximum.
PAUSE_S, PAUSE_S_MAX = 0.5, 30.0

# What a client of NFS calls a file that is removed, but still open in one of its processes.
_REMOVED = re.compile(r"\.nfs[0-9a-f]{16,}")
# Errors that a retry will not cure.
_FINAL = (
    errno.EEXIST,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
)
# Errors where no file can be made.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
# The default of `last`; unlike a caller's names, these need not exist.
_LAST = (METADATA, "__*.metadata", MANIFEST, "*.index.json", "*.index.*.json")
# What they mark.  The target may have one that the source lacks, where a save was killed.
_MARKED = (
    (METADATA, "*.distcp"),
    (MANIFEST, TENSORS),
    (MANIFEST, TREE),
    (INDEX_NAME, "*.safetensors"),
    ("diffusion_pytorch_model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin.index.json", "*.bin"),
)
# A file of a rank, which may have saved without the others.
_SHARD = re.compile(r"__(\d+)_.*\.distcp")


def drain(
    source: Path,
    target: Path,
    *,
    last: Collection[str] = _LAST,
    retries: int = 3,
    bandwidth: float | None = None,
) -> Future[int]:
    """Copy a folder to another file system, or to a URL of fsspec, in the background.

    Parameters
    ----------
    source : str, bytes or os.PathLike
        The folder to copy, with everything below it, such as a checkpoint that
        ``torch.distributed.checkpoint`` has written to a local drive.
    target : str, bytes or os.PathLike
        The folder to copy to, or a URL such as "s3://bucket/run", which needs fsspec.  It
        is created if it does not exist; other files in it stay.
    last : collection of str, optional
        The files that mark the others as complete, as patterns of names or of paths below
        `source`.  They are copied in this order, once all other files are durable; of
        several for one pattern, those in the deepest folders first.  Each pattern must
        match a file, except the default: ".metadata", "__*.metadata" (of ranks that save
        without collectives), "manifest.json", and "*.index.json" and "*.index.*.json",
        such as "model.safetensors.index.json".
    retries : int, default 3
        How often to retry a file after an error (0 to 1000), after growing pauses.
    bandwidth : float, optional
        The limit for all files together, in bytes per second; by default unlimited.

    Returns
    -------
    concurrent.futures.Future
        A future that is done when all files are durable; its result is their size in bytes.
        ``cancel()`` works until the first of the `last` files, and leaves no partial file.
        ``result()`` raises OSError, with errno and path, if copying fails after all
        retries, and CheckpointError if a file of `source` changes before the `last` files
        are copied.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        `source` does not exist, or is not a folder.
    CheckpointError
        `source` has a model whose files are being replaced, or a save that did so was
        interrupted; or its files change while they are listed.
    TypeError, ValueError
        An argument is of the wrong type or out of range; `last` names a file that does not
        exist; `target` is `source` or inside it; or `source` has a file that is not a
        regular one, such as a symbolic link.
    ImportError
        `target` is a URL, and fsspec, or the package that it needs for this URL, is not
        installed.

    Notes
    -----
    Up to four files are copied at once.  Each is synced, read back and compared by
    checksum, and only then gets its name (at a URL it has its name at once).

    Several ranks can drain to one folder, but no two drains may write the same files, and
    nobody may save there meanwhile.  In a folder, the drain of a model with an index waits
    for a save that names its files, and fails after 60 s; saves to it, and other drains of
    such a model, wait for the drain in the same way.  The drain of a checkpoint with
    ``.metadata``, or such a file of a rank, makes a save fail that began before it, and
    fails if one begins before it has copied that file.  So does one of two drains with the
    same name at the end of `last`, and a drain beside a save of the same step.  Of drains
    of other files at least one fails if one has replaced a file of the other.  The file of
    a rank is not copied to a target that has ``.metadata``, which readers take first:
    FileExistsError.

    Call ``drain`` again to continue one that was interrupted: files that already exist with
    the same bytes are not copied again.  Before a file is replaced, the `last` files of the
    target that come after it are removed, so that the target never looks complete when it
    is not; of the default, and of several for one pattern, only those in its folder or
    above it.  So are those of the default that `source` lacks, if they mark the file.  The
    index of a model, ``model.safetensors.index.json``, is not removed, but says that files
    are being replaced, until it is copied, for readers that need none.  In a folder they
    go when the first new file is complete: a drain that fails earlier, as for want of
    space, leaves an older copy complete.  One that fails at one of the `last` files leaves
    those before it, because what they mark is complete.

    New folders and files of a mounted file system give their group and others no right
    that the mode of their source does not give.  Their owner may read and write.

    Errors that a retry will not cure (EEXIST, ENOSPC, EDQUOT, EROFS, EACCES, EPERM,
    ENOTDIR, ENAMETOOLONG) fail at once.  Python's exit waits for the copy.

    Examples
    --------
    >>> with nvmeio.checkpoint.atomic_directory("epoch-3") as folder:
    ...     nvmeio.save(folder / "weights.npy", np.arange(10))
    >>> copying = nvmeio.checkpoint.drain("epoch-3", "elsewhere/epoch-3")
    >>> copying.result()
    4176
    >>> nvmeio.load("elsewhere/epoch-3/weights.npy").tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    work = Drain(source, place_of(target), last, retries, bandwidth)
    work.start()
    return work.future


class Drain:
    """One copy of a folder in progress."""

    def __init__(
        self,
        source: Path,
        place: Place,
        last: Collection[str],
        retries: int,
        bandwidth: float | None,
        saved: Manifest | None = None,
    ) -> None:
        self.source = absolute_folder("source", source)
        refuse_url("source", source, "only the target may be one")
        self.place = place
        unordered = isinstance(last, (str, bytes, Set))
        names = [] if unordered else list(last)
        if unordered or not all(isinstance(name, str) for name in names):
            raise TypeError(f"last is {last!r:.100}; it must be a sequence of names")
        self.retries = whole("retries", retries, 0, RETRIES_MAX)
        self.pace = _Pace(bandwidth)
        real = os.path.realpath(self.source)
        inside = os.path.commonpath([real, os.path.realpath(place.root)])
        if os.path.isabs(place.root) and inside == real:
            if os.path.realpath(place.root) == real:
                raise ValueError(
                    f"{self.source!r} is both source and target; choose another target"
                )
            raise ValueError(
                f"the target, {place.root!r}, is inside the source, {self.source!r}; "
                "choose a target outside"
            )
        # What the files are known to be.
        self._records: dict[str, Record] = {}
        self._block_bytes = BLOCK_BYTES
        if saved is not None:
            known = saved.files.items()
            self._records = {n: each for n, each in known if each.checksums is not None}
            self._block_bytes = saved.block_bytes
        folders, self._states = _found_below(self.source)
        self.sizes = {name: state[0] for name, state in self._states.items()}
        for name, size in self.sizes.items():
            if os.path.basename(name) == INDEX_NAME and size == len(REPLACING):
                _require_whole(os.path.join(self.source, os.path.dirname(name)))
        self.folders, self._made = folders, False
        # Those above others mark what is below them, too.
        ordered = sorted(self.sizes, key=lambda name: (-name.count("/"), name))
        named = [[n for n in ordered if _is(n, pattern)] for pattern in names]
        self.last = list(dict.fromkeys(name for found in named for name in found))
        self._order = {name: number for number, name in enumerate(self.last)}
        # A caller's name that only one file has marks all files.  Others, such as one of
        # each step in a folder of steps, mark what is in their folder.
        alone = {found[0] for found in named if len(found) == 1 and last is not _LAST}
        self._marks_in = defaultdict(list)
        for name in self.last:
            folder = "" if name in alone else os.path.dirname(name)
            self._marks_in[folder].append(name)
        for pattern in names:
            optional = last is _LAST or pattern == METADATA
            if not optional and not any(_is(n, pattern) for n in self.sizes):
                raise ValueError(
                    f"last has {pattern!r}, which matches no file in {self.source!r}"
                )
        self.future: ToldFuture[int] = ToldFuture()
        self.future.add_done_callback(self._end_if_cancelled)
        self._patterns = names
        # Those that the target does not have from before.
        self._new: set[str] = set()
        self._marked_missing: set[str] = set()
        # What keeps other writers away, and what raises if one has begun, by marking file.
        self._holding = contextlib.ExitStack()
        self._require_held: dict[str, Callable[[], None]] = {}
        # Why they could not be kept away.  Nothing is replaced then, but all may be there.
        self._not_held: dict[str, OSError] = {}
        self._held_in: dict[str, list[str]] = defaultdict(list)
        # The files of the copy, as they were before they got their names or were compared.
        self._committed: dict[str, os.stat_result] = {}
        # Largest first, so that no thread is left with a large one at the end.
        first = self.sizes.keys() - set(self.last)
        self._left = deque(sorted(first, key=lambda name: (-self.sizes[name], name)))
        self._mutex = threading.Lock()
        self._at_work = 1
        self._failed: BaseException | None = None
        self._stop = threading.Event()

    def _end_if_cancelled(self, future: "Future[int]") -> None:
        if future.cancelled():
            self._stop.set()

    def start(self) -> None:
        """Copy in threads; if none can be started, in this one.

        One thread starts the others: Ctrl-C in this one lets all of them work, or none.
        """
        try:
            start_thread(self._work_all, DRAINING)
        except RuntimeError:
            # No thread can be started, or Python is shutting down.
            self._work_all()

    def _work_all(self) -> None:
        for _ in range(min(FILES, len(self._left)) - 1):
            with self._mutex:
                self._at_work += 1
            try:
                start_thread(self._work, DRAINING)
            except RuntimeError:
                with self._mutex:
                    self._at_work -= 1
                break
        self._work()

    def _work(self) -> None:
        """Copy files until none is left; the last thread then copies the `last` files."""
        try:
            self._prepare()
            while not self._stop.is_set() and (name := self._next()) is not None:
                self._copy(name)
        except BaseException as error:
            self._fail(error)
        with self._mutex:
            self._at_work -= 1
            if self._at_work:
                return
        try:
            with self._holding:
                self._finish()
        except BaseException as error:
            self._fail(error)
        self._report()

    def _prepare(self) -> None:
        """Create the folders, once, and remove unfinished files of earlier drains."""
        with self._mutex:
            if self._made:
                return
            self._made = True
            try:
                self._make_folders()
                # Also the last in each folder, of which there is one in each such copy.
                finals = {os.path.dirname(name): name for name in self.last}
                held = {*filter(is_held, self.sizes), *finals.values(), *self._unindexed()}
                for name in sorted(held):
                    self._try(name, functools.partial(self._hold, name))
                mine = set(map(short_name, self.sizes))
                for folder in self.folders:
                    self._try(folder, functools.partial(self.place.clean, folder, mine))
            except BaseException:
                # Before the other threads go on.
                self._stop.set()
                raise

    def _make_folders(self) -> None:
        if not self._records:
            # Files that replace these from now on must have other times.
            times = [time_ns for _, time_ns in self._states.values()]
            self._stop.wait(ambiguous_s(max(times, default=0)))
        for folder, mode in self.folders.items():
            self._try(folder, functools.partial(self.place.make, folder, mode))

    def _hold(self, name: str) -> None:
        of_all = _beside(name, METADATA)
        is_of_rank = OF_RANK.fullmatch(os.path.basename(name)) is not None
        if is_of_rank and of_all in self.sizes:
            # Whose claim excludes the ranks.
            return
        if is_of_rank:
            # Also before: else what is refused would take the right of another.
            self._refuse_all_ranks(of_all)
        mode = os.stat(self.source).st_mode
        if name in self.sizes:
            mode = os.stat(os.path.join(self.source, name)).st_mode
        holding = self.place.holding(name, mode, self._pause)
        require_held = None
        try:
            require_held = self._holding.enter_context(holding)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._not_held[name] = error
        if require_held is not None:
            self._require_held[name] = require_held
        if not is_of_rank:
            self._held_in[os.path.dirname(name)].append(name)
        if is_of_rank:
            self._refuse_all_ranks(of_all)

    def _unindexed(self) -> Iterator[str]:
        """Yield what stands for the index of model files of ranks, by folder."""
        ranks: dict[str, set[str]] = defaultdict(set)
        for name in self.sizes:
            found = NUMBERED.fullmatch(os.path.basename(name))
            if found and found["rank"] and found["stem"] == "model":
                ranks[os.path.dirname(name)].add(found["rank"])
        for folder, prefixes in ranks.items():
            prefix = prefixes.pop() if len(prefixes) == 1 else ""
            if (name := os.path.join(folder, f"{prefix}{INDEX_NAME}")) not in self.sizes:
                yield name

    def _refuse_all_ranks(self, name: str) -> None:
        if self.place.size(name) is not None:
            words = f"{METADATA} beside it is of all ranks, and would be loaded first; "
            raise FileExistsError(errno.EEXIST, f"{words}choose another target")

    def _next(self) -> str | None:
        if self.future.cancelled():
            raise CancelledError
        with self._mutex:
            return self._left.popleft() if self._left else None

    def _fail(self, error: BaseException) -> None:
        with self._mutex:
            self._failed = self._failed or error
        self._stop.set()

    def _finish(self) -> None:
        if self._failed is not None:
            return
        self._settle(self.folders)
        self._compare_alike()
        # From here on, cancel() returns False.
        if not self.future.set_running_or_notify_cancel():
            raise CancelledError
        self._look_at_source()
        self._look_at_target()
        # If one fails, those before it stay: what they mark is complete, and others may
        # have replaced them.
        for name in self.last:
            self._copy(name)
            self._settle([os.path.dirname(name)])

    def _compare_alike(self) -> None:
        """Raise FileExistsError if the target has one file for names of several."""
        alike = defaultdict(list)
        for name in self.sizes.keys() - set(self.last):
            alike[unicodedata.normalize("NFC", name).casefold()].append(name)
        for names in alike.values():
            for name in names if len(names) > 1 else ():
                self._try(name, functools.partial(self._require, name, sorted(names)))

    def _require(self, name: str, alike: list[str]) -> None:
        with File(os.path.join(self.source, name)) as file:
            if not self._is_there(name, file, self.sizes[name]):
                words = f"{' and '.join(map(repr, alike))} have one name there"
                raise FileExistsError(errno.EEXIST, words)

    def _look_at_source(self) -> None:
        """Raise CheckpointError if a file of the source has changed."""
        # NFS remembers for seconds what is in a folder, and what a file is like.
        for folder in self.folders:
            ask_anew(os.path.join(self.source, folder))
        for name, seen in self._states.items():
            path = os.path.join(self.source, name)
            ask_anew(path)
            if _state_of(os.stat(path)) != seen:
                raise CheckpointError(f"{path} has changed while it was copied")

    def _look_at_target(self) -> None:
        """Raise FileExistsError if another has replaced or removed what was copied."""
        for require_held in self._require_held.values():
            require_held()
        for name in self._committed.keys() - set(self.last):
            now = self.place.status(name)
            if now is None or _is_another(now, self._committed[name]):
                self._try(name, functools.partial(self._require_same, name))

    def _require_same(self, name: str) -> None:
        """Raise FileExistsError unless a file has the bytes that were copied."""
        with (
            contextlib.suppress(FileNotFoundError),
            File(os.path.join(self.source, name)) as file,
        ):
            if self._is_there(name, file, self.sizes[name]):
                return
        words = "another process has replaced or removed this file of the copy"
        raise FileExistsError(errno.EEXIST, words)

    def _settle(self, folders: Iterable[str]) -> None:
        for folder in folders:
            self._try(folder, functools.partial(self.place.settle, folder))

    def _report(self) -> None:
        if self.future.cancelled():
            return
        if self._failed is None:
            self.future.set_result(sum(self.sizes.values()))
        elif self.future.running() or self.future.set_running_or_notify_cancel():
            where = self.place.root
            self.future.fail(self._failed, f"{self.source} was not copied to {where}")

    def _copy(self, name: str) -> None:
        try:
            self._try(name, functools.partial(self._copy_once, name))
        except BaseException:
            self.place.abandon(name)
            raise

    def _try(self, name: str, act: Callable[[], object]) -> None:
        """Call `act`, and retry unless its error is final; `name` is for the message."""
        for attempt in range(self.retries + 1):
            try:
                act()
                return
            except (CancelledError, CheckpointError):
                raise
            except Exception as error:
                number = getattr(error, "errno", None)
                refused = isinstance(error, PermissionError) or number in _FINAL
                if refused or attempt == self.retries:
                    raise self._named(error, name) from error
            self._pause(min(PAUSE_S * 2**attempt, PAUSE_S_MAX))

    def _named(self, error: Exception, name: str) -> Exception:
        where = f"{self.place.root.rstrip('/')}/{name}".rstrip("/")
        source = os.path.join(self.source, name)
        if isinstance(error, OSError) and error.filename == source:
            where = source
        if isinstance(error, _DifferentError):
            return OSError(errno.EIO, str(error), where)
        if isinstance(error, OSError):
            number = error.errno or errno.EIO
            words = f"{error.strerror or error} (while it is copied)"
            if (
                number == errno.ENOSPC
                and name in self.sizes
                and (free := self.place.free_bytes()) is not None
            ):
                words += f": {needed_and_free(self.sizes[name], free)}"
            return OSError(number, words, where)
        return OSError(errno.EIO, f"{type(error).__name__}: {error}", where)

    def _copy_once(self, name: str) -> None:
        path = os.path.join(self.source, name)
        with File(path) as file:
            before = os.fstat(file.fileno())
            size = self.sizes[name]
            if _state_of(before) != self._states[name]:
                raise CheckpointError(f"{path} has changed while it was copied")
            there, status = self.place.size(name), self.place.status(name)
            if there == size and self._is_there(name, file, size):
                self._note(name, status)
                return
            self._require_right(name)
            marks = [] if there is None else self._marks_of(name)

            def replace(at: str) -> None:
                """Remove the marks if the file is replaced now, not earlier or later."""
                if at == self.place.replaced_at:
                    if there is None and name.endswith(".safetensors"):
                        self._mark_missing(_beside(name, INDEX_NAME))
                    self._remove_old_last(marks)
                    if at != "commit":
                        self._new.add(name)
                if at == "commit":
                    self._require_right(name)

            replace("open")
            with self._saying_why(name), self.place.writing(name, before.st_mode) as writer:
                expected, seen = 0, Checksums(self._block_bytes)
                record = self._records.get(name)
                with contextlib.closing(pieces_of(file, size)) as pieces:
                    for piece in pieces:
                        self._throttle(piece)
                        expected = crc32c.crc32c(piece.data, expected)
                        if record is not None:
                            seen(piece)
                        writer.write(piece)
                if _state_of(os.fstat(file.fileno())) != _state_of(before):
                    raise CheckpointError(f"{path} has changed while it was copied")
                if record is not None:
                    try:
                        require_same(path, seen, record)
                    except CheckpointError as error:
                        # It may be good when it is read again.
                        raise _DifferentError(str(error)) from None
                replace("finish")
                writer.finish()
                found, nbytes = self._sum(writer.read())
                if (found, nbytes) != (expected, size):
                    raise _DifferentError(
                        f"{size} bytes with the checksum {expected:08x} were written, but "
                        f"{nbytes} with {found:08x} were read back"
                    )
                replace("commit")
                self._note(name, writer.commit())
                self._new.add(name)

    @contextlib.contextmanager
    def _saying_why(self, name: str) -> Iterator[None]:
        """Say it if another has removed the new file because it has the right now."""
        try:
            yield
        except FileNotFoundError:
            self._require_right(name)
            raise

    def _require_right(self, name: str) -> None:
        """Raise OSError if another has begun to write what marks a file.

        Ask it when the new file has its temporary name, before it gets its own: the other
        one removes those.
        """
        marks = {mark for folder in above(name) for mark in self._held_in.get(folder, ())}
        for mark in marks.union([name], _default_marks(name)):
            if (error := self._not_held.get(mark)) is not None:
                words = f"{error.strerror}, so others were not kept away from the beginning"
                raise OSError(error.errno, words)
            if (require_held := self._require_held.get(mark)) is not None:
                require_held()

    def _note(self, name: str, status: os.stat_result | None) -> None:
        if status is not None:
            self._committed[name] = status

    def _marks_of(self, name: str) -> list[str]:
        """Return the `last` files that no longer fit once a file is replaced."""
        place = self._order.get(name, -1)
        marks = []
        for folder in above(name):
            those = self._marks_in.get(folder, ())
            marks += [mark for mark in those if self._order[mark] > place]
        # Those that the source lacks.
        for mark in set(_default_marks(name)) - self._order.keys():
            if any(_is(mark, pattern) for pattern in self._patterns):
                marks.append(mark)
        return marks

    def _remove_old_last(self, names: Iterable[str]) -> None:
        """Remove some of the `last` files, which mark the target as complete, once."""
        with self._mutex:
            old = set(names) - self._new
            self._invalidate(old)
            self._new |= old

    def _mark_missing(self, index: str) -> None:
        """Mark the index of a model that the target lacks, once."""
        with self._mutex:
            if index in self._order and index not in self._marked_missing:
                if self.place.size(index) is None:
                    self._invalidate([index])
                self._marked_missing.add(index)

    def _mark(self, index: str) -> None:
        """Let an index say that its files may be of two models.

        HuggingFaceStorageReader needs none.
        """
        mode = os.stat(os.path.join(self.source, index)).st_mode
        with self.place.writing(index, mode) as writer:
            writer.write(np.frombuffer(REPLACING, np.uint8))
            writer.finish()
            self._require_right(index)
            writer.commit()

    def _invalidate(self, names: Collection[str]) -> None:
        for name in names:
            if os.path.basename(name) == INDEX_NAME and name in self._order:
                self._mark(name)
            else:
                self.place.remove(name, functools.partial(self._require_right, name))
        for folder in {os.path.dirname(name) for name in names}:
            self.place.settle(folder)

    def _is_there(self, name: str, file: File, size: int) -> bool:
        """Return whether the target already has this file, with the same checksum."""
        return self._sum(self.place.read(name)) == self._sum(pieces_of(file, size))

    def _sum(self, pieces: Generator[Bytes, None, None]) -> tuple[int, int]:
        checksum = nbytes = 0
        # Else what it has open would stay so as long as somebody keeps the error.
        with contextlib.closing(pieces):
            for piece in pieces:
                self._check_stopped()
                checksum = crc32c.crc32c(piece.data, checksum)
                nbytes += len(piece)
        return checksum, nbytes

    def _throttle(self, piece: Bytes) -> None:
        self._check_stopped()
        self._pause(self.pace.delay(len(piece)))

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise CancelledError

    def _check_stopped(self) -> None:
        if self.future.cancelled() or self._stop.is_set():
            raise CancelledError


class _DifferentError(Exception):
    """The bytes that were read back are not those that were written."""


class _Pace:
    """Computes the pauses that keep all threads together below a bandwidth."""

    def __init__(self, bandwidth: float | None) -> None:
        if bandwidth is not None:
            number = isinstance(bandwidth, (int, float)) and not isinstance(bandwidth, bool)
            if not number:
                raise TypeError(
                    f"bandwidth is {shown(bandwidth)}; it must be a number of bytes per "
                    "second, such as 50e6"
                )
            if not 0 < bandwidth < math.inf:
                raise ValueError(
                    f"bandwidth is {bandwidth}; it must be more than 0 and finite; None is "
                    "no limit"
                )
        self.bandwidth = bandwidth
        self._mutex = threading.Lock()
        self._free_at = 0.0

    def delay(self, nbytes: int) -> float:
        if self.bandwidth is None:
            return 0.0
        with self._mutex:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self.bandwidth
            return begin - now


def _state_of(found: os.stat_result) -> tuple[int, int]:
    # Not the inode: some FUSE file systems give a file another number each time.
    return found.st_size, found.st_mtime_ns


def _is_another(now: os.stat_result, before: os.stat_result) -> bool:
    """Return whether a file may have taken the place of another.

    Some file systems change the inode number, or the time, of the same file, and in others
    two files have the same time.
    """
    return not os.path.samestat(now, before) or _state_of(now) != _state_of(before)


def _require_whole(folder: str) -> None:
    """Raise CheckpointError if a model's files may be of two saves.

    A copy of them would take the place of a good one.
    """
    try:
        require_whole(folder)
    except SafetensorError as error:
        raise CheckpointError(str(error)) from None


def _is(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(
        os.path.basename(name), pattern
    )


def _beside(name: str, other: str) -> str:
    """Return the name of another file in the folder of a file."""
    return os.path.join(os.path.dirname(name), other)


def _default_marks(name: str) -> Iterator[str]:
    """Yield what marks a file by default, and its folder may have."""
    for mark, pattern in _MARKED:
        if _is(name, pattern):
            yield _beside(name, mark)
    if found := _SHARD.fullmatch(os.path.basename(name)):
        yield _beside(name, f"__{found[1]}{METADATA}")


# Folders have their modes, and files a state (size and time) by which a change is noticed.
_Below = tuple[dict[str, int], dict[str, tuple[int, int]]]


def _found_below(source: str) -> _Below:
    """Return what is below a folder at one moment: it is listed until two lists agree."""
    found = _files_below(source)
    for _ in range(_LISTS_MAX):
        before, found = found, _files_below(source)
        if before == found:
            return found
    words = f"its files changed each of the {_LISTS_MAX} times that it was listed"
    raise CheckpointError(f"{source} is being written to: {words}")


def _files_below(source: str) -> _Below:
    """Return all folders and files below a folder, by relative path."""
    folders, states = {"": os.stat(source).st_mode}, {}
    left = deque(folders)
    while left:
        folder = left.popleft()
        path = os.path.join(source, folder)
        # NFS remembers for seconds what is in a folder.
        ask_anew(path)
        try:
            listed = os.scandir(path)
        except FileNotFoundError:
            if not folder or exists_now(path):
                raise
            # As for a file that was removed.
            continue
        with listed as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = os.path.join(folder, entry.name)
                try:
                    state = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    if not exists_now(os.path.join(source, name)):
                        # The next list tells whether something has replaced it.
                        continue
                    state = os.lstat(os.path.join(source, name))
                mode = state.st_mode
                if stat.S_ISDIR(mode):
                    folders[name] = mode
                    left.append(name)
                elif _REMOVED.fullmatch(entry.name) or entry.name == LOCK:
                    continue
                elif stat.S_ISREG(mode):
                    states[name] = _state_of(state)
                else:
                    raise ValueError(
                        f"{os.path.join(source, name)} is not a regular file; remove it, "
                        "because drain() copies everything in a folder"
                    )
    return folders, states
