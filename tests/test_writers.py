"""Each writer of the package on each fault of a file system: old or new, or a refusal."""

import asyncio
import contextlib
import errno
import os
import re
import subprocess
import sys
import tarfile
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import nvmeio
import nvmeio.safetensors.numpy
import nvmeio.safetensors.torch
from fuse_mounts import empty
from nvmeio.checkpoint import Checkpointer, CheckpointError, atomic_directory, drain
from nvmeio.safetensors import SafetensorError
from nvmeio.torch._offload import slots
from nvmeio.torch.dcp import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from nvmeio.torch.serialization import save_to
from workloads.common import Faults

OLD, NEW = np.arange(1000), np.arange(1000, 3000)


def tensor(array):
    return torch.from_numpy(array)


def in_a_loop(function):
    return lambda *arguments: asyncio.run(function(*arguments))


def read_numbers(path):
    return np.fromfile(path, np.int64)


def load_file(path):
    return nvmeio.safetensors.numpy.load_file(path)["a"]


def save_under_install(path, array):
    with nvmeio.safetensors.install():
        safetensors.torch.save_file({"a": tensor(array)}, path)


def save_model(path, array):
    model = torch.nn.Module()
    model.register_buffer("a", tensor(array))
    nvmeio.safetensors.torch.save_model(model, path)


def save_sharded(path, array):
    parts = {str(n): part for n, part in enumerate(np.split(array, 4))}
    nvmeio.safetensors.save_sharded(parts, path, len(array) * 4)


def load_sharded(path):
    found = nvmeio.safetensors.load_sharded(path, framework="np")
    return np.concatenate([found[name] for name in sorted(found)])


def configure(path, array):
    config = {"queue_depth": len(array)}
    nvmeio.deepspeed.write_aio_config(path, config)


def load_config(path):
    return of_length(nvmeio.deepspeed.aio_config(path)["queue_depth"])


def index_archive(path, array, source):
    path.mkdir(exist_ok=True)
    source.mkdir(exist_ok=True)
    archive = source / f"{len(array)}.tar"
    with tarfile.open(archive, "w") as file:
        file.add(__file__, "a.txt")
    nvmeio.torch.TarDataset(archive, index=path).close()


def of_profiles(function):
    """Call a function with a folder of its own for profiles."""

    def call(path, *arguments):
        with mock.patch.dict(os.environ, XDG_CONFIG_HOME=str(path)):
            return function(*arguments)

    return call


def save_profile(array):
    options = {"engine": "threads", "block_size": 1 << 20, "queue_depth": len(array)}
    best = nvmeio.profiles.Choice(options | {"bounce": "auto", "workers": 2}, {"s": 1.0})
    profile = nvmeio.profiles.new_profile(".", both=best, read=best, write=best)
    nvmeio.profiles.save_profile(profile)


def load_profile():
    return of_length(nvmeio.profiles.load_profile(".").both.options["queue_depth"])


def of_length(length):
    return {len(OLD): OLD, len(NEW): NEW}[length]


def save_folder(path, array):
    with atomic_directory(path, replace=True) as folder:
        nvmeio.write_file(array, folder / "file")


def save_step(path, array):
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, {"a": array})


def save_step_later(path, array):
    with Checkpointer(path) as checkpointer:
        checkpointer.save_async(1, {"a": array}).result()


def load_step(path):
    with Checkpointer(path) as checkpointer:
        return checkpointer.restore(1)["a"]


def drain_folder(path, array, source):
    source.mkdir(exist_ok=True)
    array.tofile(source / "file")
    drain(source, path, retries=0).result()


def drain_steps(path, array, source):
    with Checkpointer(source, drain_to=path) as checkpointer:
        checkpointer.save(1, {"a": array})
        checkpointer.drained.result()


def saved_by(writer, **options):
    def save(path, array):
        state = {"a": tensor(array[:1000].copy())}
        try:
            dcp.save(state, storage_writer=writer(str(path), **options), no_dist=True)
        except dcp.CheckpointException as error:
            raise error.failures[0][0] from error

    return save


def loaded_by(reader):
    def load(path):
        state = {"a": torch.zeros(1000, dtype=torch.int64)}
        dcp.load(state, storage_reader=reader(str(path)), no_dist=True)
        return next(each for each in (OLD, NEW) if each[0] == state["a"][0])

    return load


def create(path, array):
    with nvmeio.ArrayFile.create(path, array.shape, array.dtype, overwrite=True) as file:
        file[:] = array
        file.flush()


def append(path, array):
    if array is OLD:
        nvmeio.save(path, OLD)
        return
    with nvmeio.ArrayFile(path, mode="r+") as file:
        file.append(NEW[1000:])
        file.refresh()
        file[:1000] = NEW[:1000]
        file.flush()


def write_with_a_file(path, array):
    with nvmeio.File(path, "w") as file:
        file.write(array)
        file.fsync()


def write_with_a_handle(path, array):
    with nvmeio.Handle() as handle:
        handle.write(array, path)
        handle.fsync(path)


async def append_awaited(path, array):
    if array is OLD:
        nvmeio.save(path, OLD)
        return
    with nvmeio.ArrayFile(path, mode="r+") as file:
        await nvmeio.aio.append(file, NEW[1000:])
        file.refresh()
        await nvmeio.aio.setitem(file, slice(1000), NEW[:1000])
        await nvmeio.aio.flush(file)


def scatter(path, array):
    with nvmeio.Handle() as handle:
        handle.scatter(path, np.arange(len(array)) * 8, 8, array)
        handle.fsync(path)


def write_many(path, array):
    with nvmeio.Handle() as handle:
        handle.write_many([(array[:500], path, 0), (array[500:], path, 4000)])
        handle.fsync(path)


def write_as_deepspeed(path, array):
    assert nvmeio.aio_write(array, str(path), 1 << 20, 8, False, False, True) == 0


def write_with_aio_handle(path, array):
    handle = nvmeio.aio_handle(1 << 20, 8, False, False, 1)
    assert handle.sync_pwrite(torch.from_numpy(array), str(path)) == 1


def save_on_disk(path, array):
    """Its file lives only as long as the tensors."""
    path.mkdir(exist_ok=True)
    weight = torch.ones(len(array), requires_grad=True)
    # Named, because the server of the tests forgets files that have no name.
    named = mock.patch.object(
        slots, "unnamed_file", lambda folder: nvmeio.File(f"{folder}/slots", "w")
    )
    with named, nvmeio.torch.save_on_disk(path, min_bytes=0, memory=0):
        result = (weight.exp() * 2).exp()
    result.sum().backward()


def offload(path, array):
    """Its files live only as long as the optimizer."""
    weight = torch.nn.Parameter(torch.zeros(len(array)))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with nvmeio.torch.offload(optimizer, path) as optimizer:
        weight.grad = torch.ones(len(array))
        optimizer.step()
        optimizer.step()


# How each writes an array, and reads it back.  What is replaced as a whole ...
REPLACING = {
    "write_file": (lambda path, array: nvmeio.write_file(array, path), read_numbers),
    "aio.write_file": (
        in_a_loop(lambda path, array: nvmeio.aio.write_file(array, path)),
        read_numbers,
    ),
    "save": (nvmeio.save, nvmeio.load),
    "aio.save": (in_a_loop(nvmeio.aio.save), nvmeio.load),
    "save_file": (
        lambda path, array: nvmeio.safetensors.numpy.save_file({"a": array}, path),
        load_file,
    ),
    "save_model": (save_model, load_file),
    "install": (save_under_install, load_file),
    "torch.save": (
        lambda path, array: nvmeio.torch.save(tensor(array), path),
        lambda path: nvmeio.torch.load(path).numpy(),
    ),
    "Lightning": (
        lambda path, array: save_to(tensor(array), path, follow=False),
        lambda path: nvmeio.torch.load(path).numpy(),
    ),
    "write_aio_config": (configure, load_config),
    "save_profile": (of_profiles(save_profile), of_profiles(load_profile)),
    "atomic_directory": (save_folder, lambda path: read_numbers(path / "file")),
    "Checkpointer.save": (save_step, load_step),
    "Checkpointer.save_async": (save_step_later, load_step),
    "drain": (drain_folder, lambda path: read_numbers(path / "file")),
    "FileSystemWriter": (saved_by(FileSystemWriter), loaded_by(FileSystemReader)),
    "HuggingFaceStorageWriter": (
        saved_by(HuggingFaceStorageWriter),
        loaded_by(HuggingFaceStorageReader),
    ),
    "HuggingFaceStorageWriter of ranks": (
        saved_by(HuggingFaceStorageWriter, save_distributed=True),
        loaded_by(HuggingFaceStorageReader),
    ),
    "HuggingFaceStorageWriter that joins": (
        saved_by(
            HuggingFaceStorageWriter, save_distributed=True, enable_consolidation=True
        ),
        loaded_by(HuggingFaceStorageReader),
    ),
}
# ... each file of it as a whole ...
IN_SHARDS = {
    "save_sharded": (save_sharded, load_sharded),
    "drain_to": (drain_steps, load_step),
}
# ... and what is written in place.
IN_PLACE = {
    "write_file in place": (
        lambda path, array: nvmeio.write_file(array, path, sync=True, atomic=False),
        read_numbers,
    ),
    "save_file in place": (
        lambda path, array: nvmeio.safetensors.numpy.save_file(
            {"a": array}, path, atomic=False
        ),
        load_file,
    ),
    "torch.save in place": (
        lambda path, array: nvmeio.torch.save(tensor(array), path, atomic=False),
        lambda path: nvmeio.torch.load(path).numpy(),
    ),
    "save in place": (
        lambda path, array: nvmeio.save(path, array, sync=True, atomic=False),
        nvmeio.load,
    ),
    "ArrayFile.create": (create, nvmeio.load),
    "ArrayFile.append": (append, nvmeio.load),
    "aio.append": (in_a_loop(append_awaited), nvmeio.load),
    "File.write": (write_with_a_file, read_numbers),
    "Handle.write": (write_with_a_handle, read_numbers),
    "Handle.scatter": (scatter, read_numbers),
    "Handle.write_many": (write_many, read_numbers),
    "aio_write": (write_as_deepspeed, read_numbers),
    "aio_handle": (write_with_aio_handle, read_numbers),
    "offload": (offload, None),
    "save_on_disk": (save_on_disk, None),
}
# What is only a cache: an error is logged.
CACHES = {"TarDataset": (index_archive, None)}
WRITERS = {**REPLACING, **IN_SHARDS, **IN_PLACE, **CACHES}
LOCKING = {"ArrayFile.append", "aio.append", "offload", "drain_to"}
LOCKING |= {"Checkpointer.save", "Checkpointer.save_async"}
WITH_A_SOURCE = {"drain", "drain_to", "TarDataset"}
ALL = set(WRITERS) - set(CACHES)
RENAMING = {*REPLACING, *IN_SHARDS}

# For each fault: the kind of mount, the faults of its calls, which writers may fail (the
# others must succeed), the errno, and what the message must say.
FAULTS = {
    # Nobody reads the files of these once they are closed.
    "flush": (
        "",
        {"flush": {"error": errno.EDQUOT}},
        ALL - {"offload", "save_on_disk"},
        errno.EDQUOT,
        "",
    ),
    "release": ("", {"release": {"error": errno.EIO}}, set(), 0, ""),
    "fsync": ("", {"fsync": {"error": errno.EIO}}, ALL, errno.EIO, ""),
    "full": ("", {"write": {"error": errno.ENOSPC}}, ALL, errno.ENOSPC, ""),
    "no link count": ("", {"getattr": {"links": 0}}, set(), 0, ""),
    "no exchange": ("", {}, set(), 0, ""),
    "no rename": (
        "",
        {"rename": {"error": errno.ENOSYS}},
        RENAMING,
        errno.ENOSYS,
        "cannot rename",
    ),
    "no O_RDWR": (
        "",
        {"open": {"mode": os.O_RDWR, "error": errno.EINVAL}},
        LOCKING | {"ArrayFile.create", "File.write", "save_on_disk"},
        errno.EINVAL,
        "reading and writing",
    ),
    "inode numbers": ("inodes", {}, set(), 0, ""),
    "no flock": ("flock=38", {}, LOCKING, errno.ENOSYS, "flock"),
    "no locks": ("flock=37", {}, LOCKING, errno.ENOLCK, "flock"),
}


@pytest.fixture
def mount(request, fuse_folder, fuse_kinds):
    """The folder of a mount that has a fault, and its control."""
    kind = FAULTS[request.param][0]
    folder = fuse_kinds(kind) if kind else fuse_folder
    empty(folder)
    (folder / "control").touch()
    faults = Faults(folder / "control")
    yield request.param, folder, faults
    faults.set()


def left_in(folder):
    """Return the names of what is temporary below a folder."""
    names = [name for _, folders, files in os.walk(folder) for name in (*folders, *files)]
    return [name for name in names if re.search(r"nvmeio-(tmp|old)|\.part", name)]


@pytest.mark.parametrize("mount", FAULTS, indirect=True)
@pytest.mark.parametrize("writer", WRITERS)
def test_the_old_one_stays_or_the_new_one_is_complete(mount, writer, tmp_path):
    name, folder, faults = mount
    _, calls, refusing, code, words = FAULTS[name]
    (save, load), path = WRITERS[writer], folder / "target"
    more = [tmp_path / "source"] if writer in WITH_A_SOURCE else []
    # Without locks, the first call fails too.
    with contextlib.suppress(OSError):
        save(path, OLD, *more)
    faults.set(**calls)
    try:
        save(path, NEW, *more)
    except OSError as error:
        raised = error
    else:
        raised = None
    fired = faults.fired()
    faults.set()
    if raised is not None:
        assert writer in refusing
        assert raised.errno == code
        assert str(folder) in os.fsdecode(raised.filename)
        assert words in str(raised)
    elif code and writer in refusing:
        assert not fired, "the fault was not reported"
    assert left_in(folder) == []
    if raised is None and load is not None:
        assert np.array_equal(load(path), NEW)
    elif writer in REPLACING and "flock" not in FAULTS[name][0]:
        assert np.array_equal(load(path), OLD)
    elif writer in IN_SHARDS:
        # Not in one step, but nothing that is neither is taken for complete.
        with contextlib.suppress(OSError, CheckpointError, SafetensorError):
            found = load(path)
            assert any(np.array_equal(found, each) for each in (OLD, NEW))


WITHOUT_PROC = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[1])
import test_writers
assert not os.listdir("/proc")
test_writers.print_errors(pathlib.Path(sys.argv[2]))
"""


def print_errors(folder):
    """Write twice with each writer, and print what fails."""
    for name, (save, load) in WRITERS.items():
        path = folder / name
        more = [folder / f"source of {name}"] if name in WITH_A_SOURCE else []
        try:
            save(path, OLD, *more)
            save(path, NEW, *more)
            assert load is None or np.array_equal(load(path), NEW)
        except OSError as error:
            sys.stdout.write(f"{name}: {error}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_without_proc_they_work_or_say_what_is_missing(tmp_path):
    script = 'mount -t tmpfs none /proc && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c"]
    command += [WITHOUT_PROC, os.path.dirname(__file__), tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    refused = dict(line.split(": ", 1) for line in said.splitlines())
    assert refused.keys() == {
        *("ArrayFile.create", "ArrayFile.append", "aio.append", "aio_write"),
    }
    assert all("needs /proc: mount it" in words for words in refused.values())
    assert left_in(tmp_path) == []
