"""Code as users of torch write it, for mypy and pyright in strict mode; not run."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.utils.data import BatchSampler, DataLoader, Subset, random_split

import nvmeio.safetensors.torch
import nvmeio.torch
import nvmeio.torch.dcp


def models(path: str) -> dict[str, torch.Tensor]:
    tensors = nvmeio.safetensors.torch.load_file(path, device="cpu", names=["weight"])
    nvmeio.safetensors.torch.save_file(tensors, "other.safetensors", {"format": "pt"})
    with nvmeio.safetensors.safe_open(path, framework="pt") as file:
        print(file.keys(), file.get_slice("weight")[:10].shape)
    model = torch.nn.Linear(10, 10)
    missing, _ = nvmeio.safetensors.torch.load_model(model, path, strict=False)
    print(missing - {"bias"})
    nvmeio.torch.save(tensors, "model.pt")
    return tensors


def training(model: torch.nn.Module, batches: Iterator[torch.Tensor]) -> None:
    optimizer = nvmeio.torch.offload(
        torch.optim.AdamW(model.parameters()), "states", memory="1GiB"
    )
    for batch in batches:
        with nvmeio.torch.save_on_disk("activations"):
            loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def computing(model: torch.nn.Module) -> torch.nn.Module:
    model = nvmeio.torch.disk_offload(model, "model.safetensors", memory="1GiB")
    print(nvmeio.torch.disk_stats(model)["bytes_read"])
    nvmeio.torch.load_disk_offload("folder", memory="1GiB", dtype=torch.bfloat16)
    table = nvmeio.torch.DiskEmbedding("table.safetensors", ["a", "b"], memory="1MiB")
    table.prefetch(torch.tensor([1]))
    print(table(torch.tensor([1])).shape, table.num_embeddings)
    return nvmeio.torch.remove_disk_offload(model)


def loading() -> None:
    dataset = nvmeio.torch.ArrayDataset("rows.npy", "labels.npy")
    for features, labels in DataLoader(dataset, batch_size=4, num_workers=2):
        print(features.shape, labels.shape)
    for batch in nvmeio.torch.BatchStream(dataset, [[0, 1], [2, 3]], depth=2):
        print(batch)
    tokens = nvmeio.torch.TokenDataset("tokens.bin", 128, dtype="uint16")
    part = Subset(tokens, range(10))
    stream = nvmeio.torch.BatchStream(part, BatchSampler(range(10), 2, drop_last=True))
    loader = DataLoader(stream, batch_size=None)
    print(next(iter(loader)), len(part), part[0])
    print([label for _, label in dataset])
    training, validation = random_split(tokens, [0.9, 0.1])
    print(len(training + validation), tokens[0].shape)
    print(nvmeio.torch.empty(10, 10, dtype=torch.bfloat16, pin_memory=True).shape)


def distributed(
    folder: Path,
) -> tuple[list[StorageWriter], list[StorageReader], AsyncStager]:
    writers: list[StorageWriter] = [
        nvmeio.torch.dcp.FileSystemWriter(folder, sync_files=False),
        nvmeio.torch.dcp.HuggingFaceStorageWriter("model", {"weight": 1}),
    ]
    readers: list[StorageReader] = [
        nvmeio.torch.dcp.FileSystemReader(folder, weights_only=True),
        nvmeio.torch.dcp.HuggingFaceStorageReader("model"),
    ]
    return writers, readers, nvmeio.torch.dcp.PoolStager()
