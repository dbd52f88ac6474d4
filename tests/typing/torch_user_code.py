"""Code as users of torch write it, for mypy and pyright in strict mode; not run."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

import nvmeio.safetensors.torch
import nvmeio.torch


def models(path: str) -> dict[str, torch.Tensor]:
    tensors = nvmeio.safetensors.torch.load_file(path, device="cpu", names=["weight"])
    nvmeio.safetensors.torch.save_file(tensors, "other.safetensors", {"format": "pt"})
    with nvmeio.safetensors.safe_open(path, framework="pt") as file:
        print(file.keys(), file.get_slice("weight")[:10].shape)
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


def loading() -> None:
    dataset = nvmeio.torch.ArrayDataset("rows.npy", "labels.npy")
    for features, labels in DataLoader(dataset, batch_size=4, num_workers=2):
        print(features.shape, labels.shape)
    for batch in nvmeio.torch.BatchStream(dataset, [[0, 1], [2, 3]], depth=2):
        print(batch)
    print(nvmeio.torch.empty(10, 10, dtype=torch.bfloat16, pin_memory=True).shape)
