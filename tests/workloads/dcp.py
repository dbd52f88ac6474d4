"""Ranks that save and load together with torch.distributed.checkpoint over gloo."""

import gc
import multiprocessing
import os
import threading

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
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

ROWS, COLUMNS = 1200, 700


def whole_mesh():
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def state_of(seed, filled=True):
    """Return a state of sharded and whole tensors, by its seed."""
    torch.manual_seed(seed)
    mesh = whole_mesh()
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


def save_together(folder, seed, by="nvmeio", collectives=True):
    """Save a state on all ranks."""
    state = state_of(seed)
    kind = FileSystemWriter if by == "nvmeio" else dcp.FileSystemWriter
    dcp.save(state, storage_writer=kind(folder), use_collectives=collectives)


def save_on_first(folder, seed):
    """Save the state of the first rank alone, as if each rank had all of it."""
    state = state_of(seed)
    if dist.get_rank() == 0:
        dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    dist.barrier()


def load_too_little(folder, seed):
    """Load each tensor by itself; return the names of those that are refused."""
    refused = []
    model = state_of(seed, filled=False)["model"]
    for name in ("tall", "wide"):
        state = {"model": {name: model[name]}}
        try:
            dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        except (CheckpointException, ValueError) as error:
            if f"elements of 'model.{name}'" in str(error) and not local(model[name]).any():
                refused.append(name)
    return refused


def load_together(folder, seed, by="nvmeio"):
    """Load a state on all ranks; return differences, and how much was read."""
    found, expected = state_of(seed, filled=False), state_of(seed)
    kind = FileSystemReader if by == "nvmeio" else dcp.FileSystemReader
    told = load_and_compare(found, expected["model"], found["model"], kind(folder), folder)
    told["said"] = [found["epoch"], list(found["betas"])]
    return told


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


def save_models(folder, by="nvmeio", joined=False, collectives=True):
    """Save a state as model files on all ranks."""
    state = state_of(3)["model"]
    kind = HuggingFaceStorageWriter if by == "nvmeio" else dcp.HuggingFaceStorageWriter
    mapping = {"wide": 1, "tall": 2, "same": 1, "bias": 2}
    options = {"enable_consolidation": True, "fqn_to_index_mapping": mapping}
    writer = kind(folder, save_distributed=True, **(options if joined else {}))
    dcp.save(state, storage_writer=writer, use_collectives=collectives)


def save_models_alone_and_join(folder):
    """Let each rank plan alone, and join the parts; return the error."""
    state = state_of(3)["model"]
    writer = HuggingFaceStorageWriter(
        folder, save_distributed=True, enable_consolidation=True
    )
    try:
        dcp.save(state, storage_writer=writer, use_collectives=False)
    except ValueError as error:
        return str(error)


def save_models_alone_under_common_names(folder):
    """Save another tensor on each rank, without collectives; return the error."""
    name = f"of {dist.get_rank()}"
    writer = HuggingFaceStorageWriter(folder, {"of 0": 1, "of 1": 2})
    try:
        dcp.save({name: torch.ones(3)}, storage_writer=writer, use_collectives=False)
    except ValueError as error:
        return str(error)


def save_models_of_parts(folder):
    """Save shards as if each were whole; return the error."""
    state = state_of(3)["model"]
    try:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder))
    except CheckpointException as error:
        return "pass save_distributed=True to save all parts" in str(error)


def save_models_that_all_have(folder, mapping):
    """Save a state that is whole on each rank, as with DDP, and return it."""
    state = {f"{i}": torch.full((100,), float(i)) for i in range(8)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, mapping))
    return state


def load_models(folder, by="nvmeio"):
    """Load a state from model files on all ranks; return differences, and bytes read."""
    found, expected = state_of(3, filled=False)["model"], state_of(3)["model"]
    kind = HuggingFaceStorageReader if by == "nvmeio" else dcp.HuggingFaceStorageReader
    return load_and_compare(found, expected, found, kind(folder), folder)


def whole_state(seed):
    """Return the sums of a state's tensors."""
    state = state_of(seed)["model"]
    return {name: local(each).double().sum().item() for name, each in state.items()}


def local(tensor):
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_and_fail(folder, failing):
    """Save a state while the drive of one rank fails; return each rank's error."""
    state = state_of(2)
    writer = FileSystemWriter(folder)
    if dist.get_rank() == failing:

        def broken(*arguments):
            raise OSError(5, "the drive of this rank is broken")

        writer._write_file = broken
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        return [type(error).__name__, "the drive of this rank is broken" in str(error)]


def save_in_a_process_after_install(folder):
    """Save by torch's process for checkpoints, given only a name; return its files.

    Twice: that process stays in the folder in which it began.
    """
    nvmeio.torch.dcp.install()
    try:
        process = AsyncCheckpointerType.PROCESS
        for each in (f"{folder}-before", folder):
            os.mkdir(each)
            os.chdir(each)
            state = {"a": torch.ones(3)}
            saving = async_save(state, checkpoint_id="a", async_checkpointer_type=process)
            saving.result()
    finally:
        nvmeio.torch.dcp.uninstall()
        # torch's process would be waited for, for half a minute.
        for each in multiprocessing.active_children():
            each.kill()
    return os.listdir(os.path.join(folder, "a"))


def stage_parts():
    """Stage distributed tensors whose local ones have an offset; return what is right."""
    mesh = whole_mesh()
    long = torch.arange(400.0)
    wide = distribute_tensor(torch.arange(4000.0).view(40, 100), mesh, [Shard(0)])
    states = DTensor.from_local(long[1:], mesh, [Shard(0)]), wide[:, 50:], wide
    staged = PoolStager().stage({"a": states[0], "b": [states[1]], "c": states[2]})
    found = staged["a"], staged["b"][0], staged["c"]
    return [
        type(each) is DTensor
        and each.placements == state.placements
        and torch.equal(each.to_local(), state.to_local())
        and each.to_local().data_ptr() != state.to_local().data_ptr()
        for each, state in zip(found, states, strict=True)
    ]


def stage_without_pool():
    """Stage more than the pool may hold; return whether all of it is right."""
    os.environ["NVMEIO_POOL_BYTES"] = "2M"
    state = {"large": torch.randn(1 << 20), "small": torch.randn(9)}
    staged = PoolStager().stage(state)
    return [torch.equal(staged[name], state[name]) for name in state]


def stage_again_and_again(folder):
    """Save in the background; return the use of the pool meanwhile and afterwards."""
    state = {"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}
    used, stager, held, given_back = nvmeio.pool_stats()["bytes_used"], PoolStager(), [], []
    for seed in range(3):
        state["a"].fill_(seed)
        writer, goes_on = FileSystemWriter(folder), threading.Event()

        def write_later(*args, write=writer.write_data, goes_on=goes_on):
            goes_on.wait(60)
            return write(*args)

        writer.write_data = write_later
        future = dcp.async_save(
            state, storage_writer=writer, async_stager=stager, no_dist=True
        )
        held.append(nvmeio.pool_stats()["bytes_used"] >= used + (8 << 20))
        goes_on.set()
        future.result()
        del future
        # torch's saving thread may not have ended yet.
        while nvmeio.pool_stats()["bytes_used"] > used:
            gc.collect()
        given_back.append(True)
    found = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
    dcp.load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    right = all(torch.equal(found[name], state[name]) for name in state)
    return {"held": held, "given back": given_back, "right": right}


def reserved_together(folder):
    """Save a sharded tensor of 8 MiB; return how much space this rank has reserved."""
    found = []
    reserve = _writing.reserve
    _writing.reserve = lambda file, nbytes, path: found.append(nbytes)
    state = {"a": distribute_tensor(torch.randn(1024, 2048), whole_mesh(), [Shard(0)])}
    dcp.save(state, storage_writer=FileSystemWriter(folder))
    _writing.reserve = reserve
    return sum(found)


def load_different(folders, models=False):
    """Load on each rank from its own folder; return the error, and what was changed."""
    state = {"x": torch.full((4,), -1.0)}
    kind = HuggingFaceStorageReader if models else FileSystemReader
    try:
        dcp.load(state, storage_reader=kind(folders[dist.get_rank()]))
    except CheckpointException as error:
        return str(error), state["x"].tolist()
    return "", state["x"].tolist()


def save_and_fail_again(folders, failing, times):
    """Fail to save on one rank, then save; return the folder's sizes after each."""
    rank, sizes = dist.get_rank(), []
    folder = folders[rank]
    write = _writing.FileSystemWriter._write_file

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    for number in range(times + 1):
        broken = rank == failing and number < times
        _writing.FileSystemWriter._write_file = fail if broken else write
        try:
            dcp.save(state_of(number), storage_writer=FileSystemWriter(folder))
        except CheckpointException:
            assert number < times
        dist.barrier()
        names = [n for n in os.listdir(folder) if n.startswith(f"__{rank}_")]
        sizes.append(len(names))
        dist.barrier()
    return sizes


def stage_sharded():
    """Stage a ShardedTensor, and change it; return the copy's type and its shard."""
    shard = torch.ones(4, 5)
    value = sharded_tensor.init_from_local_shards(
        [sharded_tensor.Shard.from_tensor_and_offsets(shard, [0, 0], 0)], 4, 5
    )
    staged = PoolStager().stage({"value": value})["value"]
    shard.zero_()
    return type(staged).__name__, staged.local_shards()[0].tensor
