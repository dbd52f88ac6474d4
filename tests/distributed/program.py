"""The program of ranks under torchrun: call one function, with its arguments as JSON."""

import datetime as dt
import errno
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nvmeio.torch.dcp import FileSystemReader, FileSystemWriter, PoolStager

WIDTH = 768
WATCHDOG_S = 240


def report(**said):
    """Print a report for the test, as one line of JSON."""
    os.write(1, (json.dumps({"rank": dist.get_rank(), **said}) + "\n").encode())


def trained(steps):
    """Return a sharded model and its optimizer, after the same steps on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    layers = [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def digests(model, optimizer):
    """Return checksums of all tensors, gathered from the shards, by name."""
    options = StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    state = {"model": of_model, "optim": of_optimizer}
    found = {}

    def walk(name, each):
        if isinstance(each, dict):
            for key, value in each.items():
                walk(f"{name}/{key}", value)
        elif isinstance(each, torch.Tensor):
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            bits = whole.contiguous().flatten().view(torch.uint8).to(torch.int64)
            places = torch.arange(1, len(bits) + 1) % 65_521
            found[name] = int((bits * places).sum())

    walk("state", state)
    return found


def save(folder, steps, way="save"):
    """Save a model and its optimizer."""
    model, optimizer = trained(steps)
    expected = digests(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "steps": steps}
    if way == "save":
        dcp.save(state, storage_writer=FileSystemWriter(folder))
    else:
        kind = AsyncCheckpointerType[way]
        options = {"async_stager": PoolStager()} if way == "THREAD" else {}
        saving = dcp.async_save(
            state,
            storage_writer=FileSystemWriter(folder),
            async_checkpointer_type=kind,
            **options,
        )
        # Changes from here on must not be saved.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saving.result()
    report(digests=expected)


def load(folder):
    """Load a model and its optimizer into untrained ones, and report their contents."""
    model, optimizer = trained(0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "steps": 0}
    dcp.load(state, storage_reader=FileSystemReader(folder))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    report(digests=digests(model, optimizer), steps=state["steps"])


def numbered(step, mesh):
    """Return a sharded state whose content depends on its step."""
    torch.manual_seed(step)
    whole = torch.randn(64, 4096)
    return {"step": step, "data": distribute_tensor(whole, mesh, [Shard(0)])}


def save_on_and_on(folder):
    """Save one state after another to the same folder until killed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    report(pid=os.getpid())
    step = 0
    while True:
        step += 1
        dcp.save(numbered(step, mesh), storage_writer=FileSystemWriter(folder))
        report(saved=step)


def hang(folder, patience_s):
    """Make one rank's drive hang; report the other ranks' errors, and when they came."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    report(pid=os.getpid())
    dcp.save(numbered(1, mesh), storage_writer=FileSystemWriter(folder))
    writer = FileSystemWriter(folder)
    if dist.get_rank() == 1:
        writer._write_file = lambda *_: time.sleep(WATCHDOG_S)
    begin = time.monotonic()
    try:
        dcp.save(numbered(2, mesh), storage_writer=writer)
    except Exception as error:
        report(error=type(error).__name__, waited_s=time.monotonic() - begin)
    os._exit(0)


def fail(folder, at):
    """Make the drive of one rank fail at some point; report the error of each rank."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save(numbered(1, mesh), storage_writer=FileSystemWriter(folder))
    writer, reader = FileSystemWriter(folder), FileSystemReader(folder)

    def broken(*_, **__):
        raise OSError(errno.EIO, f"the drive of rank {rank} is broken")

    last = dist.get_world_size() - 1
    if at == "write" and rank == last:
        writer._write_file = broken
    elif at == "finish" and rank == 0:
        writer._get_metadata_path = broken
    elif at == "read" and rank == last:
        reader.read_data = broken
    try:
        if at == "async":
            writer._write_file = broken if rank == last else writer._write_file
            dcp.async_save(numbered(2, mesh), storage_writer=writer).result()
        elif at == "read":
            dcp.load(numbered(0, mesh), storage_reader=reader)
        else:
            dcp.save(numbered(2, mesh), storage_writer=writer)
    except dcp.CheckpointException as error:
        report(error=str(error))


def save_large(folder):
    """Save tensors of 2 MiB and more in shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save(large(mesh), storage_writer=FileSystemWriter(folder))
    report(saved=True)


def load_large(folder):
    """Load them from the drive; report how many bytes were read, and how many they have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected, found = large(mesh), large(mesh)
    for tensor in found.values():
        tensor.to_local().zero_()
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    before = bytes_read()
    dcp.load(found, storage_reader=FileSystemReader(folder))
    read = bytes_read() - before
    pairs = [(found[name].to_local(), expected[name].to_local()) for name in expected]
    report(
        right=all(torch.equal(*pair) for pair in pairs),
        read=read,
        share=sum(tensor.nbytes for tensor, _ in pairs),
    )


def large(mesh):
    """Return sharded tensors, at least 2 MiB of them on each rank."""
    torch.manual_seed(3)
    return {
        f"{number}": distribute_tensor(torch.randn(4096, 512 + number), mesh, [Shard(0)])
        for number in range(8)
    }


def bytes_read():
    """Return how many bytes this process has read from drives."""
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])


def main():
    """Find the function, and call it."""
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    patience_s = arguments.get("patience_s", 120)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=patience_s))
    globals()[name](**arguments)
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo that takes the GIL while Python exits would abort the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
