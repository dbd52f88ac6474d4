"""Model files while system calls fail or resources run out."""

import os
import resource
import traceback
from functools import partial

import numpy as np

import nvmeio
from nvmeio._native.region import Region
from nvmeio.checkpoint import Checkpointer
from nvmeio.safetensors import numpy as ours
from nvmeio.safetensors import safe_open, save_sharded
from workloads.common import pause, report


def outcome_of(function, *args, **options):
    """Call a function; return "ok", or its error message."""
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def populate():
    """Populate memory while madvise(2) fails."""
    region = Region(1 << 20)
    pause()
    report(outcome_of(region.populate, 0, 1 << 20))


def limit_addresses(more_bytes):
    """Leave this process so many bytes of addresses."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * 4096
    bound = used + more_bytes if more_bytes != resource.RLIM_INFINITY else more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))


def with_idle_memory(path, folder, idle_bytes, more_bytes):
    """Use memory in each way, while the pool has free memory that the system lacks."""
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, {"a": np.zeros(os.path.getsize(path), np.uint8)})
    state = checkpointer.restore()
    nbytes = os.path.getsize(path)
    ways = {
        "load": partial(ours.load_file, path, direct=True),
        "map": partial(ours.load_file, path, mapped=True),
        "empty": partial(nvmeio.empty, nbytes, np.uint8),
        "pinned": partial(nvmeio.empty, nbytes, np.uint8, pin_memory=True),
        "region": partial(Region, nbytes),
        "restore": checkpointer.restore,
        "stage": lambda: checkpointer.save_async(2, state).result(),
    }
    outcomes = {}
    for name, way in ways.items():
        idle = nvmeio.empty(idle_bytes, np.uint8)
        del idle
        limit_addresses(more_bytes)
        outcomes[name] = outcome_of(way)
        limit_addresses(resource.RLIM_INFINITY)
        nvmeio.pool_trim()
    checkpointer.close()
    report(outcomes)


def load_within(path, address_bytes, idle_bytes=0):
    """Load a file in a process with little memory, some of it free memory of the pool."""
    nvmeio.default_handle()
    nvmeio.empty(idle_bytes, np.uint8)
    limit_addresses(address_bytes)
    report([outcome_of(ours.load_file, path, direct=True), nvmeio.default_handle().stats()])


def load_and_save(source, target):
    """Load a file and save it again, with any limit of the pool."""
    tensors = ours.load_file(source, direct=True)
    ours.save_file(tensors, target)
    again = ours.load_file(target)
    same = all(np.array_equal(again[name], tensors[name]) for name in tensors)
    report([same, list(again) == list(tensors)])


def save_with(path):
    """Save a model file while system calls fail."""
    pause()
    outcome = outcome_of(ours.save_file, {"a": np.full(1 << 20, 7, np.uint8)}, path)
    report([outcome, nvmeio.default_handle().pending])


def save_unsynced_and_synced(path, files):
    """Save a model twice, under strace: in several files, or with None in a single one."""
    tensors = {str(number): np.full(1 << 20, 7, np.uint8) for number in range(files or 1)}
    save = partial(save_sharded, max_shard_size=1 << 20) if files else ours.save_file
    pause()
    report([outcome_of(save, tensors, path, sync=sync) for sync in (False, True)])


def save_and_stand_still(path):
    """Stop in the middle of a save until killed."""

    def stop(written, total):
        if written >= total // 2:
            pause()

    ours.save_file({"a": np.full(64 << 20, 7, np.uint8)}, path, progress=stop)


def load_with(path, direct):
    """Load a model file while system calls fail."""
    import safetensors.numpy

    # Import it first, because it maps the file.
    expected = safetensors.numpy.load_file(path)
    found = {}
    pause()
    outcome = outcome_of(lambda: found.update(ours.load_file(path, direct=direct)))
    same = all(np.array_equal(found[name], expected[name]) for name in found)
    report([outcome, same, nvmeio.default_handle().pending])


def load_as_other(path):
    """Load another user's file, cold and cached, each more than once."""
    from nvmeio._native.system_calls import cached_fraction

    with open(path, "rb") as file:
        found = [cached_fraction(file.fileno(), 0, os.fstat(file.fileno()).st_size)]
        try:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_NORMAL)
        finally:
            ways = []
            for _ in range(3):
                before = nvmeio.default_handle().stats()["bytes_direct"]
                ours.load_file(path)
                ways.append(nvmeio.default_handle().stats()["bytes_direct"] > before)
    report([found, ways])


def fork_while_reading(path):
    """Read a file in order; go on in a child and in the parent."""
    expected = ours.load_file(path, direct=False)

    def check(file, names):
        for name in names:
            assert np.array_equal(file.get_tensor(name), expected[name]), name

    with safe_open(path, "np", direct=True) as file:
        names = file.offset_keys()
        part = file.get_slice(names[3])
        check(file, names[:4])
        child = os.fork()
        if child == 0:
            try:
                assert np.array_equal(part[1:3], expected[names[3]][1:3])
                check(file, names[4:])
                check(file, reversed(names))
                with safe_open(path, "np", direct=True) as again:
                    check(again, names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        check(file, names[4:])
        _, status = os.waitpid(child, 0)
    report([os.waitstatus_to_exitcode(status), nvmeio.default_handle().pending])
