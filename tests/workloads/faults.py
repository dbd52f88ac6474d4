"""Transfers while system calls fail or resources run out."""

import ctypes
import errno
import gc
import os
import resource
import threading
import weakref
from pathlib import Path

import numpy as np

import nvmeio
from helpers import pattern
from seccomp_profiles import install_program
from workloads.common import (
    Records,
    errors_of,
    make_file,
    pause,
    read_checked,
    read_small,
    report,
    write_checked,
)


def made_handle(single_submit=False, **options):
    """Make a Handle, or DeepSpeed's op if blocks are submitted one by one."""
    if single_submit:
        return nvmeio.aio_handle(single_submit=True, **options).handle
    return nvmeio.Handle(**options)


def round_trip(folder, engine="auto", size=1 << 20, early=True, **options):
    """Write, read and fsync after the pause; report the result of each step."""
    records = Records()
    source, target = f"{folder}/source", f"{folder}/target"
    data = make_file(source, size)
    handle = made_handle(engine=engine, **options) if early else None
    pause()
    handle = handle or made_handle(engine=engine, **options)
    steps = {
        "write": errors_of(write_checked, handle, target, data),
        "read": errors_of(read_checked, handle, source, data),
        "unaligned": errors_of(read_checked, handle, source, data[7:-9], 7, 3),
        "small": errors_of(read_small, handle, source, data[:4096]),
        "fsync": errors_of(handle.fsync, target),
        "again": errors_of(read_checked, handle, source, data),
    }
    size_left = os.stat(target).st_size if os.path.exists(target) else None
    report(
        {
            "steps": steps,
            "size_left": size_left,
            "pending": handle.pending,
            "log": records.lines,
            **handle.stats(),
        }
    )
    handle.close()


def open_handle(engine="auto", **options):
    """Open a handle after the pause; report engines() and the log."""
    records = Records()
    pause()
    said = ""
    try:
        for _ in range(2):
            said = nvmeio.Handle(engine=engine, **options).stats()["engine"]
    except OSError as error:
        said = f"{errno.errorcode[error.errno]}: {error}"
    report({"handle": said, "log": records.lines, "engines": nvmeio.engines()})


def whole_files(folder, size=300_000):
    """Write a shorter file over a longer one, with aio_write, after the pause."""
    path = f"{folder}/target"
    make_file(path, 2 * size)
    data = pattern(size, 1)
    pause()
    ended = errors_of(nvmeio.aio_write, data, path, 65536, 8, False, True, False)
    found = Path(path).read_bytes()
    assert found[:size] == data
    report({"aio_write": ended, "size_left": len(found)})


def describe_file(path, size=100_000):
    """Open a file after the pause; report its alignment, and whether reads are right."""
    data = make_file(path, size)
    pause()
    with nvmeio.File(path) as file, nvmeio.Handle(engine="sync") as handle:
        read_checked(handle, file, data)
        read_checked(handle, file, data[5:], 5)
        report({"direct": file.direct, "alignment": file.alignment})


def open_without_descriptors(folder):
    """Submit after the pause, without free descriptors; then again with some."""
    path = f"{folder}/source"
    data = make_file(path, 10_000)
    handle = nvmeio.Handle()
    pause()
    buffer = bytearray(len(data))
    try:
        handle.submit_read(buffer, path)
    except OSError as error:
        first = [errno.errorcode[error.errno], error.filename]
    read_checked(handle, path, data)
    report({"first": first})


def dead_ring(folder, engine):
    """Submit a read to a ring that can no longer be entered; report all results."""
    records = Records()
    path = f"{folder}/source"
    data = make_file(path, 1 << 20)
    op = nvmeio.aio_handle(engine=engine)
    handle = op.handle
    read_checked(handle, path, data)

    class Watched(np.ndarray):
        """An array that supports weak references, which show whether it is alive."""

    buffer = np.zeros(len(data), np.uint8).view(Watched)
    alive = weakref.ref(buffer)
    pause()
    request = handle.submit_read(buffer, path)
    del buffer
    first = errors_of(request.wait)
    later = [errors_of(lambda: handle.submit_read(bytearray(4096), path).wait())]
    later.append(errors_of(op.async_pread, bytearray(4096), path))
    later.append(errors_of(op.wait))
    del request
    gc.collect()
    assert alive() is not None
    pending = handle.pending
    handle.close()
    gc.collect()
    assert alive() is not None
    report(
        {
            "first": first,
            "later": later,
            "pending": pending,
            "log": records.lines,
        }
    )


def few_descriptors(folder, engine, count=48):
    """Write and read more files at once than there are descriptors."""
    handle = nvmeio.Handle(block_size=4096, engine=engine)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
    paths = [f"{folder}/{engine}-{number}" for number in range(count)]
    parts = [pattern(10_000 + number, number) for number in range(count)]
    writes = [
        handle.submit_write(part, path) for part, path in zip(parts, paths, strict=True)
    ]
    assert [write.wait() for write in writes] == [len(part) for part in parts]
    opened = []
    try:
        opened.extend(os.open(path, os.O_RDONLY) for path in paths)
        fired = "never"
    except OSError as error:
        fired = errno.errorcode[error.errno]
    for descriptor in range(used, used + 8):
        errors_of(os.close, descriptor)
    buffers = [bytearray(len(part)) for part in parts]
    reads = [
        handle.submit_read(buffer, path)
        for buffer, path in zip(buffers, paths, strict=True)
    ]
    assert [read.wait() for read in reads] == [len(part) for part in parts]
    assert buffers == parts
    report({"fired": fired, "engine": handle.stats()["engine"]})


def refusal_of_handle(engine):
    """Open a handle, which fails; return the message."""
    try:
        nvmeio.Handle(engine=engine)
    except OSError as error:
        return str(error)
    return ""


def no_descriptor(engine):
    """Open a handle without free descriptors."""
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    report({"handle": refusal_of_handle(engine)})


def no_memlock(folder, engine):
    """Transfer while no memory may be locked."""
    records = Records()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.create_string_buffer(4096)
    refused = libc.mlock(page, ctypes.c_size_t(4096))
    path = f"{folder}/memlock-{engine}"
    data = pattern(1 << 20)
    with nvmeio.aio_handle(engine=engine) as handle:
        write_checked(handle.handle, path, data)
        read_checked(handle.handle, path, data)
        locked = handle.new_cpu_locked_tensor(len(data), np.empty(0, np.uint8))
        handle.read(locked, path)
        assert locked.tobytes() == data
        report(
            {
                "mlock": errno.errorcode[ctypes.get_errno()] if refused else "ok",
                "engine": handle.stats()["engine"],
                "bytes_locked": nvmeio.pool_stats()["bytes_locked"],
                "is_pinned": handle.is_pinned(locked),
                "log": records.lines,
            }
        )


def can_start_thread():
    """Return whether a thread can be started."""
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return False
    return True


def no_threads(engine):
    """Open a handle while no thread may be started."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    said = refusal_of_handle(engine)
    report({"fired": not can_start_thread(), "handle": said})


def no_more_threads(folder, engine):
    """Transfer through the page cache while no more threads may be started."""
    data = pattern(1 << 20)
    path = f"{folder}/threads-{engine}"
    with nvmeio.Handle(block_size=65536, engine=engine, direct=False) as handle:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        steps = {
            "write": errors_of(write_checked, handle, path, data),
            "fsync": errors_of(handle.fsync, path),
            "read": errors_of(read_checked, handle, path, data),
        }
        report({"fired": not can_start_thread(), "steps": steps, **handle.stats()})


def refuse_by_seccomp(number, error):
    """Make a system call fail from now on, as profiles of containers do."""
    allow, answer = 0x7FFF0000, 0x00050000 | error
    # Load the number of the call; if it is equal, return the errno, else allow.
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, answer)]
    install_program([*program, (0x06, 0, 0, allow)])


def seccomp(folder, error):
    """Transfer while a seccomp filter refuses io_uring_setup."""
    records = Records()
    io_uring_setup = 425
    refuse_by_seccomp(io_uring_setup, error)
    path = f"{folder}/seccomp"
    data = pattern(1 << 20)
    with nvmeio.Handle() as handle:
        write_checked(handle, path, data)
        read_checked(handle, path, data[3:], 3)
        engine = handle.stats()["engine"]
    report({"engine": engine, "log": records.lines, "engines": nvmeio.engines()})


def container(folder, program):
    """Transfer under the seccomp filter of a container's profile."""
    install_program(program)
    data = pattern(1 << 20)
    with nvmeio.Handle() as handle:
        write_checked(handle, f"{folder}/inside", data)
        read_checked(handle, f"{folder}/inside", data)
        report({"engine": handle.stats()["engine"], "engines": nvmeio.engines()})


def file_size_limit(folder, engine, limit, exists):
    """Write beyond RLIMIT_FSIZE."""
    path = f"{folder}/limited-{engine}-{exists}"
    if exists:
        make_file(path, 4096)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    data = pattern(4 * limit)
    with nvmeio.Handle(block_size=65536, engine=engine) as handle:
        ended = errors_of(lambda: handle.submit_write(data, path).wait())
        found = Path(path).read_bytes()
        assert found == data[: len(found)]
        read_checked(handle, path, found)
        report({"write": ended, "size_left": len(found), **handle.stats()})
