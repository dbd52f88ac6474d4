"""Training steps whose activations are on disk, under faults."""

import gc
from collections import Counter
from contextlib import nullcontext

import torch

import nvmeio
from cases.seeded import EXPECTED, each_case
from nvmeio.torch import save_on_disk
from nvmeio.torch._offload import slots as _slots
from workloads.activations import same_bits
from workloads.common import report


def in_chunks(x):
    """Multiply views with gaps."""
    one, two = x.chunk(2, -1)
    return torch.cat([one * two.sin(), two * one.cos()], -1)


OPERATIONS = (
    torch.sin,
    torch.nn.functional.gelu,
    in_chunks,
    lambda x: x * x.T.contiguous().T,
    lambda x: torch.relu_(x * 2),
    lambda x: x.softmax(-1) * x,
    lambda x: torch.nn.functional.dropout(x, 0.1),
)


def step(draw, context):
    """Return loss and gradients of a random graph, or the error of its drive."""
    torch.manual_seed(draw.randrange(1 << 30))
    x = torch.randn(draw.choice((16, 100, 700)), 128, requires_grad=True)
    # Drawn here, so that a failure does not change the random numbers.
    chain = draw.choices(OPERATIONS, k=draw.randint(2, 20))
    twice = draw.random() < 0.3
    try:
        with context:
            y = x
            for operation in chain:
                y = operation(y)
            loss = y.square().mean()
        grads = torch.autograd.grad(loss, x, retain_graph=twice)
        if twice:
            grads += torch.autograd.grad(loss, x)
    except OSError as error:
        return error
    return [loss, *grads]


def activation_cases(first, count, folder):
    """Take steps; expect the right gradients, or an error that names the folder."""
    torch.set_num_threads(1)
    counts = Counter()
    for draw in each_case(first, count):
        state = draw.getstate()
        expected = step(draw, nullcontext())
        draw.setstate(state)
        memory = draw.choice((0, 100_000, 1 << 20))
        draw.setstate(state)
        found = step(draw, save_on_disk(folder, min_bytes=1024, memory=memory))
        if isinstance(found, OSError):
            if found.errno not in EXPECTED or found.filename != folder:
                raise found
            # The traceback keeps the frames alive, and so the graph.
            found.__traceback__ = None
            counts["failed"] += 1
        else:
            assert same_bits(found, expected)
            counts["right"] += 1
        found = expected = None
        # After a failed backward pass torch keeps the nodes that were ready until the next
        # one.
        x = torch.ones(1, requires_grad=True)
        (x.sin() * x.cos()).backward()
        gc.collect()
        assert len(_slots._live) == 0
    counts["engine is " + nvmeio.Handle().stats()["engine"]] += 1
    report(counts)
