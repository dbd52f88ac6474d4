"""Models whose weights are on a drive, under Ctrl-C."""

import torch
from torch import nn

import nvmeio
import nvmeio.safetensors.torch
import nvmeio.torch
from workloads.common import report
from workloads.signals import Sweep

WIDTH = 64


def make_model(rows):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(nn.Embedding(rows, WIDTH), *layers).requires_grad_(False)


def results(model, ids):
    """Return the output, and the gradient of what the layers get."""
    x = model[0](ids).requires_grad_()
    found = model[1:](x)
    found.square().sum().backward()
    return found.detach(), x.grad


def untrue(store):
    """Return what a store counts wrongly while nobody uses it."""
    # A read that nobody knows of any more keeps its memory until it has ended.
    nvmeio.default_handle().drain(30)
    whole = [each for each in store.weights if not each.is_in_pieces]
    used = sum(each.nbytes for each in whole if each.values or each.reading)
    ahead = sum(each.nbytes for each in store.weights if each.is_ahead)
    missing = sum(not each.values and not each.reading for each in whole)
    counted = {
        "used": (store.stats()["bytes_used"], used),
        "ahead": (store._ahead, ahead),
        "missing": (store._missing, missing),
        "reads": (len(store._reads), sum(bool(each.reading) for each in whole)),
    }
    return {name: pair for name, pair in counted.items() if pair[0] != pair[1]}


def interrupt_weights(folder, rows=5000):
    """Interrupt passes of a model at each place; report what later passes found."""
    torch.set_num_threads(1)
    path = f"{folder}/model.safetensors"
    nvmeio.safetensors.torch.save_file(make_model(rows).state_dict(), path)
    ids = torch.arange(0, rows, 37)
    ids, others = ids[:40], ids[-40:]
    expected, of_others = (results(make_model(rows), each) for each in (ids, others))
    # The least, and a table of which 40 rows do not fit.
    memory = 2 * 4 * WIDTH * WIDTH + 4 * WIDTH + 30 * (4 * WIDTH + 16)
    model = nvmeio.torch.disk_offload(make_model(rows), path, memory=memory, tables="0")
    store = model[1].weight.store
    sweep = Sweep("/nvmeio/torch/_weights/")
    for _ in range(3):
        results(model, ids)
    targets = sweep.targets(lambda: results(model, ids))[::2]
    came, bad = 0, {}
    for target in targets:
        came += sweep.run(lambda: results(model, ids), target)
        try:
            left = untrue(store)
            for asked, right in ((ids, expected), (others, of_others)):
                if not all(map(torch.equal, results(model, asked), right)):
                    left["results"] = "wrong"
        except BaseException as error:
            left = {"error": repr(error)}
        if left:
            bad[" at ".join(map(str, sweep.place()))] = left
    report({"places": len(targets), "came": came, "left": bad})
