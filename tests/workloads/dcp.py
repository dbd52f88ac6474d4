"""Ranks that save and load together with torch.distributed.checkpoint over gloo."""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import nvmeio
from nvmeio.torch.dcp import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    PoolStager,
    _writing,
)
from workloads.common import report

ROWS, COLUMNS = 1200, 700


def end_rank():
    """End a rank without finalizing the interpreter.

    As a core file showed, a thread of gloo drops a tensor (AsyncWork's destructor) and
    wants the GIL while Python finalizes.  Python ends it by pthread_exit(3), which unwinds
    through a noexcept function and aborts: in 3 of 14 runs on a busy machine.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def begin(rendezvous, rank, size):
    """Join the process group."""
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size
    )
    return init_device_mesh("cpu", (size,))


def state_of(mesh, seed, filled=True):
    """Return a state of sharded and whole tensors, by its seed."""
    torch.manual_seed(seed)
    wide, tall = torch.randn(ROWS, COLUMNS), torch.randn(32, 64 * COLUMNS)
    same = torch.randn(90_000)
    if not filled:
        wide, tall, same = torch.zeros_like(wide), torch.zeros_like(tall), same * 0
    return {
        "model": {
            "wide": distribute_tensor(wide, mesh, [Shard(0)]),
            "tall": distribute_tensor(tall, mesh, [Shard(1)]),
            "same": distribute_tensor(same, mesh, [Replicate()]),
            "bias": same[:10].clone(),
        },
        "epoch": seed if filled else None,
        "betas": (0.9, 0.99) if filled else (0, 0),
    }


def bytes_read():
    """Return how many bytes the default handle has read, without headers.

    What the kernel counts in /proc/self/io varies: the rank that is first to read a header
    is charged for its read-ahead, and a rank whose code was evicted for reading it again.
    """
    stats = nvmeio.default_handle().stats()
    return sum(stats[f"bytes_{how}"] for how in ("direct", "buffered", "bounced"))


def save_together(rendezvous, rank, size, folder, seed, by="nvmeio", collectives=True):
    """Save a state on all ranks; report the result."""
    state = state_of(begin(rendezvous, rank, size), seed)
    kind = FileSystemWriter if by == "nvmeio" else dcp.FileSystemWriter
    dcp.save(state, storage_writer=kind(folder), use_collectives=collectives)
    report("saved")
    end_rank()


def load_together(rendezvous, rank, size, folder, seed, by="nvmeio"):
    """Load a state on all ranks; report differences, and how much was read."""
    mesh = begin(rendezvous, rank, size)
    found, expected = state_of(mesh, seed, filled=False), state_of(mesh, seed)
    kind = FileSystemReader if by == "nvmeio" else dcp.FileSystemReader
    told = load_and_compare(found, expected["model"], found["model"], kind(folder), folder)
    told["said"] = [found["epoch"], list(found["betas"])]
    report(told)
    end_rank()


def load_and_compare(state, expected, found, reader, folder):
    """Load a state; return the wrong tensors, and how much was read."""
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    before = bytes_read()
    dcp.load(state, storage_reader=reader)
    read = bytes_read() - before
    wrong = [
        name
        for name, tensor in expected.items()
        if not torch.equal(local(found[name]), local(tensor))
    ]
    share = sum(local(tensor).nbytes for tensor in expected.values())
    return {"wrong": wrong, "read": read, "share": share}


def save_models(
    rendezvous, rank, size, folder, by="nvmeio", joined=False, collectives=True
):
    """Save a state as model files on all ranks."""
    state = state_of(begin(rendezvous, rank, size), 3)["model"]
    kind = HuggingFaceStorageWriter if by == "nvmeio" else dcp.HuggingFaceStorageWriter
    mapping = {"wide": 1, "tall": 2, "same": 1, "bias": 2}
    options = {"enable_consolidation": True, "fqn_to_index_mapping": mapping}
    writer = kind(folder, save_distributed=True, **(options if joined else {}))
    dcp.save(state, storage_writer=writer, use_collectives=collectives)
    report("saved")
    end_rank()


def save_models_alone_and_join(rendezvous, rank, size, folder):
    """Let each rank plan alone, and join the parts; report the error."""
    state = state_of(begin(rendezvous, rank, size), 3)["model"]
    writer = HuggingFaceStorageWriter(
        folder, save_distributed=True, enable_consolidation=True
    )
    try:
        dcp.save(state, storage_writer=writer, use_collectives=False)
    except ValueError as error:
        report(str(error))
    end_rank()


def save_models_of_parts(rendezvous, rank, size, folder):
    """Save shards as if each were whole; report the error."""
    state = state_of(begin(rendezvous, rank, size), 3)["model"]
    try:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder))
    except CheckpointException as error:
        report("pass save_distributed=True to save all parts" in str(error))
    end_rank()


def load_models(rendezvous, rank, size, folder, by="nvmeio"):
    """Load a state from model files on all ranks; report differences, and bytes read."""
    mesh = begin(rendezvous, rank, size)
    found, expected = state_of(mesh, 3, filled=False)["model"], state_of(mesh, 3)["model"]
    kind = HuggingFaceStorageReader if by == "nvmeio" else dcp.HuggingFaceStorageReader
    report(load_and_compare(found, expected, found, kind(folder), folder))
    end_rank()


def whole_state(rendezvous, rank, size, seed):
    """Report the sums of a state's tensors."""
    state = state_of(begin(rendezvous, rank, size), seed)["model"]
    report({name: local(each).double().sum().item() for name, each in state.items()})
    end_rank()


def local(tensor):
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_and_fail(rendezvous, rank, size, folder, failing):
    """Save a state while the drive of one rank fails; report each rank's error."""
    state = state_of(begin(rendezvous, rank, size), 2)
    writer = FileSystemWriter(folder)
    if rank == failing:

        def broken(*arguments):
            raise OSError(5, "the drive of this rank is broken")

        writer._write_file = broken
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        report([type(error).__name__, "the drive of this rank is broken" in str(error)])
    end_rank()


def stage_without_pool():
    """Stage more than the pool may hold; report whether all of it is right."""
    state = {"large": torch.randn(1 << 20), "small": torch.randn(9)}
    staged = PoolStager().stage(state)
    report([torch.equal(staged[name], state[name]) for name in state])


def stage_again_and_again(folder):
    """Save in the background; report the use of the pool meanwhile and afterwards."""
    state = {"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}
    used, stager, held, given_back = nvmeio.pool_stats()["bytes_used"], PoolStager(), [], []
    for seed in range(3):
        state["a"].fill_(seed)
        writer = FileSystemWriter(folder)
        future = dcp.async_save(
            state, storage_writer=writer, async_stager=stager, no_dist=True
        )
        held.append(nvmeio.pool_stats()["bytes_used"] >= used + (8 << 20))
        future.result()
        del future
        # torch's saving thread may not have ended yet.
        while nvmeio.pool_stats()["bytes_used"] > used:
            gc.collect()
        given_back.append(True)
    found = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
    dcp.load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    right = all(torch.equal(found[name], state[name]) for name in state)
    report({"held": held, "given back": given_back, "right": right})


def reserved_together(rendezvous, rank, size, folder):
    """Save a sharded tensor of 8 MiB; report how much space this rank has reserved."""
    mesh, found = begin(rendezvous, rank, size), []
    reserve = _writing.reserve
    _writing.reserve = lambda file, nbytes, path: found.append(nbytes)
    state = {"a": distribute_tensor(torch.randn(1024, 2048), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=FileSystemWriter(folder))
    _writing.reserve = reserve
    report(sum(found))
    end_rank()
