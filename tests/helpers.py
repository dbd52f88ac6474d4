"""Shared by tests of transfers: bytes, memory, routes, page cache, descriptors, limits."""

import contextlib
import importlib.util
import itertools
import mmap
import os
import resource
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import CancelledError

import numpy as np
import pytest

import nvmeio
from nvmeio._native.system_calls import cached_fraction

ENGINES = ("io_uring", "libaio", "threads", "sync")
PAGE = 4096
MIB = 1 << 20

# What git checks out for a file that Git LFS has not downloaded.
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 12345\n"
)

# A queue so small that a few hundred KiB overfill it.
BLOCK = 64 << 10
DEPTH = 4


# Only children import it, because numpy knows its dtypes by name from then on.
need_ml_dtypes = pytest.mark.skipif(
    importlib.util.find_spec("ml_dtypes") is None, reason="ml_dtypes is not installed"
)


def since_torch(version, has):
    """Return a mark that skips a test with a torch that is older."""
    import torch

    number = f"{version[0]}.{version[1]}"
    reason = f"torch before {number} has no {has}"
    return pytest.mark.skipif(torch.__version__ < version, reason=reason)


def edge_sizes():
    """Return edge sizes by name, as functions of the alignment."""
    return {
        "0": lambda align: 0,
        "1": lambda align: 1,
        "align-1": lambda align: align - 1,
        "align": lambda align: align,
        "align+1": lambda align: align + 1,
        "block-1": lambda align: BLOCK - 1,
        "block": lambda align: BLOCK,
        "block+1": lambda align: BLOCK + 1,
        "more than the queue": lambda align: 3 * DEPTH * BLOCK + 777,
    }


def pattern(size, seed=0):
    """Return bytes that cannot be mistaken for zeros, canaries or other patterns."""
    return np.random.default_rng([size, seed]).bytes(size)


class Guarded:
    """Memory `residue` bytes beyond a page boundary, with canaries on either side.

    Canaries notice what a device writes out of bounds; ASan does not.  The system decides
    whether ordinary memory has small pages, and so goes through bounces.  For memory of the
    pool, address and size alone decide.
    """

    CANARY = 0xA5

    def __init__(self, content, residue=0, *, pool=False):
        size = content if isinstance(content, int) else len(content)
        allocate = nvmeio.empty if pool else np.empty
        self._all = allocate(size + residue + 3 * PAGE, np.uint8)
        self._all[:] = self.CANARY
        self._begin = -self._all.ctypes.data % PAGE + PAGE + residue
        self.array = self._all[self._begin : self._begin + size]
        if not isinstance(content, int):
            self.array[:] = np.frombuffer(content, np.uint8)

    def content(self):
        """Return the bytes, after checking the canaries."""
        before = self._all[: self._begin]
        behind = self._all[self._begin + len(self.array) :]
        assert (before == self.CANARY).all(), (
            "bytes before the borrowed memory were overwritten"
        )
        assert (behind == self.CANARY).all(), (
            "bytes after the borrowed memory were overwritten"
        )
        return self.array.tobytes()


def routes(handle):
    """Return how many bytes took each route, as a Counter, which ignores zeros."""
    stats = handle.stats()
    return Counter(
        {way: stats[f"bytes_{way}"] for way in ("direct", "buffered", "bounced")}
    )


def expected_routes(op, size, align, offset=0, residue=0, bounce="auto"):
    """Return how many bytes take each route, by the rules of docs/design.md.

    `align` is ``File.alignment``, 1 without O_DIRECT.  An unaligned address must be odd;
    for even ones the route depends on the device.
    """
    begin, end = offset, offset + size
    edge = max(align, PAGE)
    whole = edge if op == "write" else align
    if begin % whole:
        begin += -begin % edge
    if end % whole:
        end -= end % edge
    middle = max(0, end - begin)
    reachable = middle and (residue + begin - offset) % align == 0 and bounce != "always"
    if align == 1 or not (reachable or (middle and bounce != "never")):
        bounced = align > 1 and op == "read" and bounce != "never"
        return Counter({"bounced" if bounced else "buffered": size})
    if not reachable and op == "read":
        return Counter(bounced=size)
    return Counter(
        {"direct" if reachable else "bounced": middle, "buffered": size - middle}
    )


def need_direct(folder):
    """Skip if the file system has no O_DIRECT."""
    with nvmeio.File(folder / "tried", "w") as file:
        if not file.direct:
            pytest.skip("the file system has no O_DIRECT")


_held = []


def drop(path):
    """Drop a file from the page cache, and check that it is gone, if that is possible."""
    _held.clear()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        deadline = time.monotonic() + 20
        while True:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if not cached_fraction(descriptor, 0, os.fstat(descriptor).st_size):
                return
            assert time.monotonic() < deadline, "the page cache keeps the file"
            time.sleep(0.01)
    finally:
        os.close(descriptor)


def cool(path):
    """Drop a file from the page cache, as far as the file system does that."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path):
    """Return how many bytes of a file are cached."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return cached_fraction(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def warm(path, nbytes=None):
    """Cache the first bytes of a file, and no others."""
    nbytes = os.path.getsize(path) if nbytes is None else nbytes
    warm_pages(path, range(-(-nbytes // PAGE)))


def warm_pages(path, pages):
    """Cache some pages of a file, and no others, until another file is dropped.

    The kernel may drop a page at any moment, and some machines drop those that nobody has
    mapped before there is need (DAMON's pageout), so they are mapped.
    """
    drop(path)
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        held = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
        if size:
            held.madvise(mmap.MADV_RANDOM)
        for page in pages:
            held[page * PAGE : page * PAGE + 1]
    _held.append(held)


def is_mapped(tensor, path):
    """Return whether the memory of a tensor or an array is a map of a file."""
    address = tensor.ctypes.data if hasattr(tensor, "ctypes") else tensor.data_ptr()
    with open("/proc/self/maps") as file:
        for line in file:
            first, *_, name = line.split(maxsplit=5)
            low, high = (int(each, 16) for each in first.split("-"))
            if low <= address < high:
                return name.strip() == str(path)
    return False


def descriptors_below(folder):
    """Return the paths of the files below a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that listed them is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder}/")]


def left_open(folder):
    """Return the files that stay open below a folder when nothing is in flight.

    A worker reports a request as done, and closes the file a moment later.
    """
    end = time.monotonic() + 10
    while (found := descriptors_below(folder)) and time.monotonic() < end:
        time.sleep(0.001)
    return found


def kernel_release():
    """Return Linux's major and minor version."""
    return tuple(map(int, os.uname().release.split(".")[:2]))


@contextlib.contextmanager
def limit(kind, value):
    """Lower a soft limit of this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def no_descriptors():
    """Let this process open no more descriptors."""
    free = os.dup(0)
    os.close(free)
    with limit(resource.RLIMIT_NOFILE, free):
        yield


@contextlib.contextmanager
def plugged(handle, folder):
    """Keep the only worker of a handle busy, so that later requests stay queued.

    The handle must have blocks of one page and a queue depth of one: `SLOW`.  The yielded
    requests are cancelled at the end.  Each has a turn of 256 blocks before a later one is
    next, so that this takes about a second or more.
    """
    path = folder / "plug"
    with open(path, "wb") as file:
        file.truncate(64 * MIB)
    memory = np.zeros(64 * MIB, np.uint8)
    with nvmeio.File(path) as file:
        plugs = [handle.submit_read(memory, file) for _ in range(4096)]
    try:
        yield plugs
    finally:
        for plug in reversed(plugs):
            plug.cancel()
        assert cancelled(plugs[-1])
        assert not any(plug.exception() for plug in plugs if not cancelled(plug))
        path.unlink()


def cancelled(request):
    """Wait for a request; return whether it was cancelled."""
    try:
        request.exception()
    except CancelledError:
        return True
    return False


def become_host(monkeypatch, name):
    """Give this host another name."""
    found = [*os.uname()]
    monkeypatch.setattr(os, "uname", lambda: os.uname_result([found[0], name, *found[2:]]))


SLOW = {"block_size": 1, "queue_depth": 1}


def interrupted_after_each_call(function, modules=""):
    """Yield after each run of a function into which Ctrl-C came, whether it was raised.

    It comes where a call of code in `modules`, prefixes of names, returns, as Python calls
    signal handlers: in the first run after the first call, in the next one after the next.
    """

    def interrupt(frame, event, arg):
        nonlocal left
        name = frame.f_globals.get("__name__", "")
        if event in ("return", "c_return") and name.startswith(modules):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    for passed in itertools.count():
        left, raised = passed, False
        sys.setprofile(interrupt)
        try:
            function()
        except KeyboardInterrupt:
            raised = True
        finally:
            sys.setprofile(None)
        if left >= 0:
            return
        yield raised


def fork(function, *args):
    """Fork a child that calls a function and ends; return the child's process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*args)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def call_in_child(function, *args):
    """Call a function in a forked child, and check that it raises nothing."""
    _, status = os.waitpid(fork(function, *args), 0)
    assert status == 0, f"{function.__name__}() failed in a child: see stderr"


def pairs_of_one_hash(count):
    """Return pairs of ints that all have the same hash, from CPython's algorithm."""
    bits, factor, begin, one = (
        2**64,
        14029467366897019727,
        2870177450012600261,
        11400714785074694791,
    )
    found, first, unfactored = [], 0, pow(factor, -1, 2**64)
    while len(found) < count:
        first += 1
        mixed = (begin + first * factor) % bits
        mixed = (mixed << 31 | mixed >> 33) * one % bits
        # The second int brings the sum to 1; it is its own hash if it is small enough.
        second = (1 - mixed) * unfactored % bits
        if second < 2**61 - 1:
            found.append((first, second))
    assert len({hash(pair) for pair in found}) == 1
    return found
