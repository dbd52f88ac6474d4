"""Write parts of a file that lie beside each other, at the same time and by every way.

Direct and buffered writes then meet in blocks of the file system and in folios of the page
cache, while a thread reads the file through the page cache.
"""

import contextlib
import itertools
import mmap
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import nvmeio
from cases.seeded import each_case
from helpers import PAGE, pattern
from workloads.common import report

SIZE = 4 << 20
# The largest folio of the page cache.
FOLIO = 2 << 20
THREADS = 6
WAYS = ("submit", "block", "scatter", "many")


def cut(rng):
    """Return the ranges of the parts of a file.

    They are ragged; or between two whole pages each there is a page of several parts.
    """
    offsets, largest = [0], rng.choice([8 << 10, 64 << 10, 400 << 10])
    ragged = rng.random() < 0.5
    while offsets[-1] < SIZE:
        if ragged:
            step = rng.choice([PAGE, 4 * PAGE, 100, 513, largest, rng.randint(1, largest)])
            steps = [step]
        else:
            steps = [rng.randint(1, largest // PAGE) * PAGE, 100, 200, PAGE - 300]
        for step in steps:
            offsets.append(min(SIZE, offsets[-1] + step))
    return [part for part in itertools.pairwise(offsets) if part[0] < part[1]]


def aligned_copy(content):
    """Return bytes at an address that suits direct I/O."""
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    memory[:] = np.frombuffer(content, np.uint8)
    return memory


def write(rng, handle, file, parts, memory):
    """Write parts in one of the ways."""
    pieces = [memory[begin:end] for begin, end in parts]
    at = [begin for begin, _ in parts]
    way = rng.choice(WAYS)
    if way == "scatter":
        sizes = [len(piece) for piece in pieces]
        handle.scatter(file, at, sizes, np.concatenate(pieces))
    elif way == "many":
        items = [(piece, file, offset) for piece, offset in zip(pieces, at, strict=True)]
        handle.write_many(items)
    elif way == "submit":
        requests = [
            handle.submit_write(piece, file, offset)
            for piece, offset in zip(pieces, at, strict=True)
        ]
        for request in requests:
            request.wait()
    else:
        for piece, offset in zip(pieces, at, strict=True):
            handle.write(piece, file, offset)


def read_until(stopped, path):
    """Read through the page cache, in order and so into large folios, until an event."""
    fd = os.open(path, os.O_RDONLY)
    try:
        while not stopped.is_set():
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for offset in range(0, SIZE, 128 << 10):
                os.pread(fd, 128 << 10, offset)
    finally:
        os.close(fd)


def on_the_device(path):
    """Return a file's bytes, past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        memory = mmap.mmap(-1, SIZE)
        assert os.preadv(fd, [memory], 0) == SIZE
        return memory[:]
    finally:
        os.close(fd)


def wrong_parts(found, expected, parts):
    """Return the ranges of which the bytes are not right."""
    return [part for part in parts if found[slice(*part)] != expected[slice(*part)]]


def write_in_turns(rng, handles, files, parts, memory):
    """Write parts one after the other, or a few at once."""
    while parts:
        count = rng.randint(1, 6)
        write(rng, rng.choice(handles), rng.choice(files), parts[:count], memory)
        parts = parts[count:]


def write_at_once(rng, path, engines, parts, memory):
    """Write all parts beside a reader, neighbours in different threads, and sync."""
    with contextlib.ExitStack() as stack:
        handles = [
            stack.enter_context(nvmeio.Handle(engine=name, queue_depth=16))
            for name in rng.choices(engines, k=2)
        ]
        files = [
            stack.enter_context(nvmeio.File(path, "r+", direct=direct))
            for direct in ("auto", "auto", False)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(THREADS + 1))
        stopped = threading.Event()
        reads = pool.submit(read_until, stopped, path)
        writes = [
            pool.submit(
                write_in_turns,
                random.Random(rng.random()),
                handles,
                files,
                parts[number::THREADS],
                memory,
            )
            for number in range(THREADS)
        ]
        try:
            for each in writes:
                each.result()
        finally:
            stopped.set()
        reads.result()
        for file in files:
            file.fsync()


def neighbours(folder, engines, first, count):
    """Write every part of a file at once, and compare, in the page cache and behind it."""
    path, parts_written = Path(folder, "file"), 0
    for rng in each_case(first, count):
        old, new = pattern(SIZE, rng.getrandbits(30)), pattern(SIZE, rng.getrandbits(30))
        with open(path, "wb") as plain:
            if rng.random() < 0.3:  # holes
                plain.truncate(SIZE)
            else:
                plain.write(old)
        parts = cut(rng)
        write_at_once(rng, path, engines, parts, aligned_copy(new))
        with open(path, "rb") as plain:
            assert wrong_parts(plain.read(), new, parts) == [], "in the page cache"
            os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            plain.seek(0)
            assert wrong_parts(plain.read(), new, parts) == [], "read anew"
        assert wrong_parts(on_the_device(path), new, parts) == [], "on the device"
        path.unlink()
        parts_written += len(parts)
    report({"parts": parts_written})


def beside_a_reader(path, engine, offset):
    """Write a part directly; meanwhile read the file, and write behind that part."""
    size = 64 << 10
    memory = aligned_copy(pattern(SIZE, 1))[: 2 * size]
    with nvmeio.Handle(engine=engine) as handle, nvmeio.File(path, "r+") as file:
        request = handle.submit_write(memory[:size], file, offset)
        with open(path, "rb") as plain:
            os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while plain.read(128 << 10):
                pass
        in_flight = not request.done()
        handle.write(memory[size + 100 : size + 300], file, offset + size + 100)
        request.wait()
        file.fsync()
    found = Path(path).read_bytes()[offset:]
    for part in slice(size), slice(size + 100, size + 300):
        assert found[part] == memory[part].tobytes(), part
    report({"in_flight": in_flight})
