"""Models whose weights are on a drive, computed on another device."""

import gc
import os

import torch
from torch import nn

import fake_device
import nvmeio.safetensors.torch as st
import nvmeio.torch
from nvmeio.torch._weights import store
from workloads.common import report


def compute_on_a_device(folder):
    """Compute on the device, and report whether bytes and order are right."""
    library = fake_device.use()
    layers = [nn.Linear(64, 64) for _ in range(16)]
    model = nn.Sequential(nn.Embedding(100, 64), *layers, nn.BatchNorm1d(64, affine=False))
    model.requires_grad_(False).eval()
    path = f"{folder}/model.safetensors"
    st.save_file(model[:-1].state_dict(), path)
    ids = torch.randint(0, 100, (3,))
    expected = model(ids)
    device = fake_device.DEVICE
    memory = 12 * (64 * 64 + 64) * 4
    new_memory = store.new_memory

    def checked(nbytes, *rest):
        array = new_memory(nbytes, *rest)
        begin = array.ctypes.data
        for each in fake_device.copying:
            assert begin >= each.address + each.nbytes or each.address >= begin + nbytes
        return array

    store.new_memory = checked
    options = {"memory": memory, "execution_device": device, "tables": "0"}
    nvmeio.torch.disk_offload(model, path, **options)
    same, read = [], []
    for number in range(3):
        with fake_device.on_stream(number % 2):
            same.append(torch.equal(model(ids.to(device)).cpu(), expected))
        read.append(nvmeio.torch.disk_stats(model)["bytes_read"])
    peak = nvmeio.torch.disk_stats(model)["bytes_peak"]
    tensors = [*model.parameters(), *model.buffers()]
    nvmeio.torch.remove_disk_offload(model)
    tensors += [*model.parameters(), *model.buffers()]
    del library
    report(
        {
            "same": same,
            "peak": peak <= memory,
            "kept": read[2] - read[1] < read[0],
            "devices": sorted({str(each.device) for each in tensors}),
            "done": sorted({each[0] for each in fake_device.log}),
        }
    )


def collect_in_a_forked_child(folder, kind):
    """Read ahead and copy, and report what a child prints that drops the model."""
    library = fake_device.use()
    device = fake_device.DEVICE if kind == "device" else torch.device("cpu")
    layers = [nn.Linear(64, 64) for _ in range(16)]
    model = nn.Sequential(*layers).requires_grad_(False)
    path = f"{folder}/model.safetensors"
    st.save_file(model.state_dict(), path)
    memory = 12 * (64 * 64 + 64) * 4
    nvmeio.torch.disk_offload(model, path, memory=memory, execution_device=device)
    model[:3](torch.ones(1, 64).to(device))
    left = model[0].weight.store._reads
    found = {"read ahead": len(left) > 0}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        try:
            del left, model, layers
            gc.collect()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        found["printed"] = pipe.read()
    found["status"] = os.waitpid(child, 0)[1]
    del library
    report(found)
