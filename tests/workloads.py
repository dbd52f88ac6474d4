"""What the children of ``children.py`` do: ``workloads.py FUNCTION JSON-ARGUMENTS``.

A workload checks contents itself, and reports by lines of JSON how each step ended.
"""

import contextlib
import ctypes
import errno
import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import struct
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import nvmeio
from helpers import PAGE, Guarded, pattern
from nvmeio import settings


def report(value):
    """Tell the parent something."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def pause():
    """Wait until the parent says go."""
    report("ready")
    sys.stdin.readline()


def errors_of(function, *args):
    """Call a function; return "ok" or the name of the errno of its OSError."""
    try:
        function(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"


def make_file(path, size, seed=0):
    """Write a file of random bytes past nvmeio, and return its bytes."""
    data = pattern(size, seed)
    with open(path, "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    return data


class Records(logging.Handler):
    """Keeps what the logger of nvmeio says."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("nvmeio").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


class Faults:
    """The faults of the FUSE file system that has this file."""

    def __init__(self, path):
        self.path = path

    def set(self, **faults):
        """Set the faults of read, write and fsync anew."""
        os.setxattr(self.path, "user.faults", json.dumps(faults).encode())

    def fired(self):
        """Return how often each fault has struck."""
        return json.loads(os.getxattr(self.path, "user.fired"))

    def waiting(self):
        """Return how many calls are held."""
        return int(os.getxattr(self.path, "user.waiting"))

    def await_waiting(self, count=1):
        """Wait until so many calls are held, for less long than they can be."""
        deadline = time.monotonic() + 20
        while self.waiting() < count:
            assert time.monotonic() < deadline, f"{count} calls should be held"
            time.sleep(0.01)


def read_checked(handle, path, data, offset=0, skew=0):
    """Read with submit_read, and assert contents and guards."""
    guarded = Guarded(len(data), skew)
    assert handle.submit_read(guarded.array, path, offset).wait() == len(data)
    assert guarded.content() == data


def write_checked(handle, path, data):
    """Write with submit_write, and assert what an ordinary read finds."""
    assert handle.submit_write(data, path).wait() == len(data)
    assert Path(path).read_bytes() == data


def read_small(handle, path, data):
    """Read synchronously, in the caller's thread."""
    guarded = Guarded(len(data))
    handle.read(guarded.array, path)
    assert guarded.content() == data


# Faults.


def round_trip(folder, engine="auto", size=1 << 20, early=True, **options):
    """Write, read and fsync after the pause; report how each step ended."""
    records = Records()
    source, target = f"{folder}/source", f"{folder}/target"
    data = make_file(source, size)
    handle = nvmeio.aio_handle(engine=engine, **options) if early else None
    pause()
    handle = handle or nvmeio.aio_handle(engine=engine, **options)
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
    """Open a handle after the pause; report what engines() and the log say."""
    records = Records()
    pause()
    said = ""
    try:
        for _ in range(2):
            said = nvmeio.aio_handle(engine=engine, **options).stats()["engine"]
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
    with nvmeio.File(path) as file, nvmeio.aio_handle(engine="sync") as handle:
        read_checked(handle, file, data)
        read_checked(handle, file, data[5:], 5)
        report({"direct": file.direct, "alignment": file.alignment})


def open_without_descriptors(folder):
    """Submit after the pause, when no descriptor is to be had; then once more."""
    path = f"{folder}/source"
    data = make_file(path, 10_000)
    handle = nvmeio.aio_handle()
    pause()
    buffer = bytearray(len(data))
    try:
        handle.submit_read(buffer, path)
    except OSError as error:
        first = [errno.errorcode[error.errno], error.filename]
    read_checked(handle, path, data)
    report({"first": first})


def dead_ring(folder, engine):
    """Submit a read to a ring that can no longer be entered; report what becomes of all."""
    records = Records()
    path = f"{folder}/source"
    data = make_file(path, 1 << 20)
    handle = nvmeio.aio_handle(engine=engine)
    read_checked(handle, path, data)

    class Watched(np.ndarray):
        """An array, of which one can tell whether it is still there."""

    buffer = np.zeros(len(data), np.uint8).view(Watched)
    alive = weakref.ref(buffer)
    pause()
    started = time.monotonic()
    request = handle.submit_read(buffer, path)
    del buffer
    first = errors_of(request.wait)
    took_s = time.monotonic() - started
    later = [errors_of(lambda: handle.submit_read(bytearray(4096), path).wait())]
    later.append(errors_of(handle.async_pread, bytearray(4096), path))
    later.append(errors_of(handle.wait))
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
            "took_s": took_s,
            "log": records.lines,
        }
    )


def few_descriptors(folder, engine, count=48):
    """Write and read more files at once than there are descriptors."""
    handle = nvmeio.aio_handle(4096, engine=engine)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
    paths = [f"{folder}/{engine}-{number}" for number in range(count)]
    parts = [pattern(10_000 + number, number) for number in range(count)]
    for part, path in zip(parts, paths, strict=True):
        handle.async_pwrite(part, path)
    assert handle.wait() == count
    opened = []
    try:
        opened.extend(os.open(path, os.O_RDONLY) for path in paths)
        fired = "never"
    except OSError as error:
        fired = errno.errorcode[error.errno]
    for descriptor in range(used, used + 8):
        errors_of(os.close, descriptor)
    buffers = [bytearray(len(part)) for part in parts]
    for buffer, path in zip(buffers, paths, strict=True):
        handle.async_pread(buffer, path)
    assert handle.wait() == count
    assert buffers == parts
    report({"fired": fired, "engine": handle.stats()["engine"]})


def no_descriptor(engine):
    """Open a handle where no descriptor is left."""
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    report({"handle": errors_of(lambda: nvmeio.aio_handle(engine=engine))})


def no_memlock(folder, engine):
    """Transfer where nothing may be locked."""
    records = Records()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.create_string_buffer(4096)
    refused = libc.mlock(page, ctypes.c_size_t(4096))
    path = f"{folder}/memlock-{engine}"
    data = pattern(1 << 20)
    with nvmeio.aio_handle(engine=engine) as handle:
        write_checked(handle, path, data)
        read_checked(handle, path, data)
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


def no_threads(engine):
    """Open a handle where no thread may be started."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        threading.Thread(target=int).start()
        fired = False
    except RuntimeError:
        fired = True
    report({"fired": fired, "handle": errors_of(lambda: nvmeio.aio_handle(engine=engine))})


def refuse_by_seccomp(number, error):
    """Let a system call fail from now on, as the profiles of containers do."""
    allow, answer = 0x7FFF0000, 0x00050000 | error
    # Load the number of the call; equal: the errno, else on.
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, answer)]
    program.append((0x06, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    filters = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, mode_filter, ctypes.c_char_p(header), 0, 0) == 0


def seccomp(folder, error):
    """Transfer where a seccomp filter refuses io_uring_setup."""
    records = Records()
    io_uring_setup = 425
    refuse_by_seccomp(io_uring_setup, error)
    path = f"{folder}/seccomp"
    data = pattern(1 << 20)
    with nvmeio.aio_handle() as handle:
        write_checked(handle, path, data)
        read_checked(handle, path, data[3:], 3)
        engine = handle.stats()["engine"]
    report({"engine": engine, "log": records.lines, "engines": nvmeio.engines()})


def file_size_limit(folder, engine, limit, exists):
    """Write beyond RLIMIT_FSIZE."""
    path = f"{folder}/limited-{engine}-{exists}"
    if exists:
        make_file(path, 4096)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    data = pattern(4 * limit)
    with nvmeio.aio_handle(65536, engine=engine) as handle:
        ended = errors_of(lambda: handle.submit_write(data, path).wait())
        found = Path(path).read_bytes()
        assert found == data[: len(found)]
        read_checked(handle, path, found)
        report({"write": ended, "size_left": len(found), **handle.stats()})


# Signals.


class Storm:
    """SIGALRM every 100 us, with a handler in Python."""

    def __init__(self):
        self.count = 0

    def strike(self, *_):
        self.count += 1

    def __enter__(self):
        signal.signal(signal.SIGALRM, self.strike)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


def signal_storm(folder, engine, size=2 << 20, rounds=2, **options):
    """Transfer in every way while signals rain."""
    path = f"{folder}/storm-{engine}"
    data = make_file(path, size)
    handle = nvmeio.aio_handle(65536, queue_depth=4, engine=engine, **options)
    with Storm() as storm:
        for number in range(rounds):
            read_checked(handle, path, data)
            read_checked(handle, path, data[5:], 5, 1)
            read_small(handle, path, data[: 60_000 + number])
            parts = [Guarded(size // 4) for _ in range(4)]
            for index, part in enumerate(parts):
                handle.async_pread(part.array, path, index * size // 4)
            assert handle.wait() == 4
            for index, part in enumerate(parts):
                assert part.content() == data[index * size // 4 : (index + 1) * size // 4]
            changed = pattern(size, number)
            write_checked(handle, f"{path}-{number}", changed)
            os.unlink(f"{path}-{number}")
        handle.fsync(path)
        handle.close()
    report({"signals": storm.count, **handle.stats()})


def interrupted(call):
    """Call, and tell whether KeyboardInterrupt came out of it."""
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def press_ctrl_c(faults):
    """Send SIGINT once a call is held, and the main thread is on its way to wait for it."""
    faults.await_waiting()
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


def ctrl_c(folder, control, engine, way, size):
    """Wait for a read that is held, be interrupted, and wait again."""
    path = f"{folder}/ctrl-c-{engine}"
    faults = Faults(control)
    data = make_file(path, size)
    file = nvmeio.File(path)
    handle = nvmeio.aio_handle(engine=engine)
    guarded = Guarded(size)
    faults.set(read={"held": True})
    presser = threading.Thread(target=press_ctrl_c, args=[faults])
    presser.start()
    if way == "request":
        request = handle.submit_read(guarded.array, file)
        came = interrupted(request.wait)
    elif way == "read":
        came = interrupted(lambda: handle.read(guarded.array, file))
    else:
        handle.async_pread(guarded.array, file)
        came = interrupted(handle.wait if way == "handle" else handle.close)
    # It came while the read was held, so within no time that the read decides.
    pending = handle.pending
    presser.join()
    faults.set()
    if way == "request":
        assert request.wait() == size
    elif way == "handle":
        assert handle.wait() == 1
    handle.close()
    assert guarded.content() == data
    report({"interrupted": came, "pending": pending, "fired": faults.fired()})


# Forks.


def fork(function, *args):
    """Fork; the child calls the function and ends.  Returns its process."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def join(child):
    """Assert that a forked child ended well."""
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def use_handle(handle, folder, name, engine):
    """Use a handle in a child, with lanes of its own."""
    path = f"{folder}/{name}"
    data = pattern(300_000, len(name))
    write_checked(handle, path, data)
    read_checked(handle, path, data)
    read_small(handle, path, data[:5000])
    handle.async_pread(bytearray(100), path)
    assert handle.wait() == 1
    assert handle.pending == 0
    assert handle.stats()["engine"] == engine


def fork_idle(folder, engine, count=8):
    """Several children at once, and their children, use a handle of the parent."""
    handle = nvmeio.aio_handle(65536, engine=engine, intra_op_parallelism=2)
    path = f"{folder}/parent-{engine}"
    data = make_file(path, 1 << 20)
    read_checked(handle, path, data)
    read_small(handle, path, data[:4096])

    def child(name, depth):
        use_handle(handle, folder, name, engine)
        if depth:
            join(fork(child, f"{name}-{depth}", depth - 1))
            use_handle(handle, folder, name, engine)
        handle.close()

    children = [fork(child, f"{engine}-{n}", 2 if n == 0 else 0) for n in range(count)]
    for _ in range(20):
        read_checked(handle, path, data)
    for process in children:
        join(process)
    read_checked(handle, path, data)
    handle.close()
    report({"engine": handle.stats()["engine"]})


def fork_registered(folder, size=4 << 20):
    """Memory that a ring has registered, and so pinned, is the parent's and the child's."""
    path = f"{folder}/registered"
    data = np.frombuffer(make_file(path, size), np.uint8)
    memory = nvmeio.empty(size, np.uint8)

    def read_into_memory(handle):
        memory[:] = 0
        handle.async_pread(memory, path)
        assert handle.wait() == 1
        assert np.array_equal(memory, data)

    def child(handle):
        assert nvmeio.pool_stats()["bytes_registered"] == 0
        memory[:] = 7
        time.sleep(0.1)  # while the parent reads
        assert (memory == 7).all()
        read_into_memory(handle)
        assert nvmeio.pool_stats()["bytes_registered"] > 0

    with nvmeio.aio_handle(4096, engine="io_uring") as handle:
        read_into_memory(handle)
        registered = nvmeio.pool_stats()["bytes_registered"]
        process = fork(child, handle)
        for _ in range(10):
            read_into_memory(handle)
        join(process)
        read_into_memory(handle)
    report({"registered": registered})


def fork_in_flight(folder, control, other, engine):
    """Fork with reads held; children use the handle or drop it, the parent goes on."""
    path = f"{folder}/held-{engine}"
    faults = Faults(control)
    data = make_file(path, 1 << 18)
    file = nvmeio.File(path)
    handle = nvmeio.aio_handle(65536, engine=engine)
    faults.set(read={"held": True})
    tracked, single = Guarded(len(data)), Guarded(len(data))
    handle.async_pread(tracked.array, file)
    request = handle.submit_read(single.array, file)
    faults.await_waiting()

    def child():
        assert handle.wait() == 0
        assert handle.pending == 0
        assert errors_of(request.wait) == "EOWNERDEAD"
        assert errors_of(request.done) == "EOWNERDEAD"
        use_handle(handle, other, f"child-{engine}", engine)

    def drop():
        nonlocal handle, request, tracked, single, file
        handle = request = tracked = single = file = None
        gc.collect()

    join(fork(child))
    join(fork(drop))
    join(fork(handle.close))
    pending = handle.pending
    faults.set()
    assert handle.wait() == 1
    assert request.wait() == len(data)
    assert tracked.content() == data
    assert single.content() == data
    handle.close()
    report({"pending": pending, "fired": faults.fired()})


def fork_from_crowd(folder, engine, threads=3, forks=6):
    """Fork while other threads submit and wait."""
    handle = nvmeio.aio_handle(16384, engine=engine)
    path = f"{folder}/crowd-{engine}"
    data = make_file(path, 1 << 18)
    over = threading.Event()

    def work():
        rounds = 0
        while not over.is_set():
            read_checked(handle, path, data)
            read_small(handle, path, data[:4096])
            rounds += 1
        return rounds

    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        for number in range(forks):
            join(fork(use_handle, handle, folder, f"{engine}-{number}", engine))
        over.set()
        rounds = [worker.result() for worker in workers]
    handle.close()
    report({"rounds": rounds})


def work_in_process(handle, folder, name, engine):
    """What a worker of multiprocessing does."""
    use_handle(handle, folder, name, engine)
    return os.getpid()


def processes(folder, engine, method):
    """Give a handle to the workers of a multiprocessing pool."""
    handle = nvmeio.aio_handle(65536, engine=engine)
    use_handle(handle, folder, "parent", engine)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        jobs = [(handle, folder, f"{method}-{n}", engine) for n in range(4)]
        workers = pool.starmap(work_in_process, jobs)
        pool.close()
        pool.join()
    assert os.getpid() not in workers
    use_handle(handle, folder, "parent-again", engine)
    report({"workers": len(set(workers))})


def data_loader(folder, method, persistent, count=32, record=5000):
    """Read records in the workers of a torch DataLoader, with a handle of the parent."""
    import torch
    from torch.utils.data import DataLoader

    path = f"{folder}/records"
    data = make_file(path, count * record)
    dataset = FileRecords(path, count, record)
    expected = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, record)
    assert torch.equal(dataset[3], expected[3])
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context=method,
    )
    for _ in range(2):
        assert torch.equal(torch.cat(list(loader)), expected)
    report({"records": count})


class FileRecords:
    """A map-style dataset of the records of a file."""

    def __init__(self, path, count, record):
        self.handle = nvmeio.aio_handle()
        self.path = path
        self.count = count
        self.record = record

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import torch

        tensor = torch.zeros(self.record, dtype=torch.uint8)
        self.handle.read(tensor, self.path, file_offset=index * self.record)
        return tensor


# Exits.

KEPT = []


def map_memory(path, size):
    """Return memory between canaries that outlives the process, as a file."""
    memory = np.memmap(path, np.uint8, "w+", shape=size + 2 * PAGE)
    memory[:] = Guarded.CANARY
    return memory[PAGE : PAGE + size]


def leave(folder, control, memory, engine, way, hold):
    """Leave the interpreter with reads in flight, each of which takes a while."""
    path = f"{folder}/leave-{engine}"
    faults = Faults(control)
    data = make_file(path, 1 << 17)
    file = nvmeio.File(path)
    handle = nvmeio.aio_handle(65536, engine=engine)
    faults.set(read={"delay_s": 0.15})
    buffer = map_memory(f"{memory}/async_pread", len(data))
    handle.async_pread(buffer, file)
    request = handle.submit_read(map_memory(f"{memory}/submit_read", len(data)), file)
    report({"pending": handle.pending})
    if hold == "global":
        KEPT.extend([handle, request])
    elif hold == "cycle":
        cycle = [handle, request]
        cycle.append(cycle)
    elif hold == "threads":
        for call in (handle.wait, request.wait):
            threading.Thread(target=call, daemon=True).start()
    elif hold == "nothing":
        del handle, request, buffer
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise ValueError("leaving")
    if way == "_exit":
        os._exit(4)


def let_go_in_flight(folder, control, engine, way):
    """Let go of everything with reads in flight; the process goes on."""
    path = f"{folder}/drop-{engine}"
    faults = Faults(control)
    data = make_file(path, 1 << 17)
    file = nvmeio.File(path)
    handle = nvmeio.aio_handle(65536, engine=engine)
    faults.set(read={"delay_s": 0.1})
    guarded = [Guarded(len(data)) for _ in range(3)]
    requests = [handle.submit_read(part.array, file) for part in guarded]
    pending = handle.pending
    if way == "close":
        handle.close()
    elif way == "handle first":
        del handle
        gc.collect()
        assert [request.wait() for request in requests] == [len(data)] * 3
    elif way == "requests first":
        del requests
        gc.collect()
        del handle
    elif way == "cycle":
        cycle = [handle, requests]
        cycle.append(cycle)
        del cycle, handle, requests
        gc.collect()
    elif way == "file first":
        file.close()
        del file, requests
        gc.collect()
        handle.close()
    # Whichever way, nothing is in flight any more.
    for part in guarded:
        assert part.content() == data
    faults.set()
    time.sleep(0.1)
    for part in guarded:
        assert part.content() == data
    report({"pending": pending, "fired": faults.fired()})


# Copies.


def copy_all_sizes():
    """Copy at each edge of the kernels, and tell which are in use."""
    error = handle_error = None
    try:
        for size in (1, 1000, 1 << 16, (1 << 20) + 1, 8 << 20, (8 << 20) + 77):
            source = np.frombuffer(pattern(size), np.uint8)
            target = np.zeros(size, np.uint8)
            nvmeio.memcpy(target, source)
            assert (target == source).all()
    except ValueError as refused:
        error = str(refused)
    try:
        nvmeio.aio_handle().close()
    except ValueError as refused:
        handle_error = str(refused)
    kernels = settings.selected_kernels()
    report({"error": error, "handle_error": handle_error, "kernels": kernels})


def copy_once(index):
    """Copy enough for a team of threads."""
    source = np.full(4 << 20, index, np.uint8)
    target = np.zeros_like(source)
    nvmeio.memcpy(target, source)
    return bool((target == index).all())


def copy_in_children(method):
    """Copy in the parent by a team, then in children."""
    assert copy_once(7)
    context = multiprocessing.get_context(method)
    with context.Pool(3) as pool:
        right = pool.map(copy_once, range(3), chunksize=1)
    report({"children": len(right), "right": all(right) and copy_once(9)})


class Copies:
    """A map-style dataset whose items are copies."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return copy_once(index)


def copy_in_data_loader(method):
    """Copy in the parent by a team, then in the workers of a torch DataLoader."""
    from torch.utils.data import DataLoader

    assert copy_once(7)
    right = []
    for persistent in (False, True):
        loader = DataLoader(
            Copies(),
            num_workers=2,
            persistent_workers=persistent,
            multiprocessing_context=method,
        )
        for _ in range(2):
            right += [bool(batch.all()) for batch in loader]
            assert copy_once(9)
    report({"batches": len(right), "right": all(right)})


def count_copy_threads(threads):
    """Count the threads that a large copy has started."""
    source = np.ones(64 << 20, np.uint8)
    before = len(os.listdir("/proc/self/task"))
    nvmeio.memcpy(np.zeros_like(source), source, threads=threads)
    report({"threads": len(os.listdir("/proc/self/task")) - before})


# The pool.


def fill_pool(most=1 << 27):
    """Take arrays of 1 MiB until there is no more, and again when all are let go."""
    arrays, error = [], ""
    try:
        while len(arrays) << 20 < most:
            arrays.append(nvmeio.empty(1 << 20, "u1"))
    except (MemoryError, ValueError) as refused:
        error = str(refused)
    stats = nvmeio.pool_stats()
    arrays.clear()
    again = False
    with contextlib.suppress(ValueError):
        again = bool(nvmeio.empty(32 << 20, "u1").nbytes)
    limits = {"limit": stats["bytes_limit"], "mapped": stats["bytes_mapped"]}
    report({**limits, "error": error, "again": again})


def bounce_in_bounds(folder):
    """Transfer ordinary memory where the pool has room for few bounces."""
    data = pattern(16 << 20)
    target = bytearray(len(data) + 1)
    with nvmeio.aio_handle(bounce="always") as handle:
        handle.write(data, f"{folder}/bounced")
        handle.read(memoryview(target)[1:], f"{folder}/bounced")
    right = bytes(memoryview(target)[1:]) == data
    report({"mapped": nvmeio.pool_stats()["bytes_mapped"], "right": right})


def main():
    """Call the function that the command line names."""
    faulthandler.enable()
    name, arguments = sys.argv[1:]
    globals()[name](**json.loads(arguments))


if __name__ == "__main__":
    main()
