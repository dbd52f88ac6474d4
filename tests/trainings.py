"""Small trainings, to compare a resumed one with one that was not interrupted."""

import torch

FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
FORMS["fused"] = {"fused": True}
KINDS = {"AdamW": {}, "Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9}, "Adagrad": {}}


def new_training(layout, kind, form, wide=8):
    """Return a model whose weights are in some order of memory, and its optimizer."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(wide, wide, 3), torch.nn.Linear(4, 2))
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    if layout == "transposed":
        for each in model:
            each.weight = torch.nn.Parameter(each.weight.detach().mT.contiguous().mT)
    make = getattr(torch.optim, kind)
    return model, make(model.parameters(), lr=0.01, **KINDS[kind], **FORMS[form])


def steps(model, optimizer, count, first=0, wide=8):
    """Train some steps, each on its own batch."""
    for seed in range(first, first + count):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(4, wide, 6, 6)).square().sum().backward()
        optimizer.step()
