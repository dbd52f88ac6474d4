"""Offloaded optimizers: helpers of their tests, and child processes."""

import os
import tempfile

import torch

import nvmeio
import nvmeio.torch
from workloads.common import pause, report

optim = torch.optim

KINDS = {
    "SGD": lambda params, **form: optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, **form
    ),
    "SGD without states": lambda params, **form: optim.SGD(params, lr=0.1, **form),
    "Adam": lambda params, **form: optim.Adam(params, weight_decay=0.1, **form),
    "Adam, amsgrad": lambda params, **form: optim.Adam(params, amsgrad=True, **form),
    "AdamW": lambda params, **form: optim.AdamW(params, **form),
    "AdamW, amsgrad, maximize": lambda params, **form: optim.AdamW(
        params, amsgrad=True, maximize=True, **form
    ),
    "NAdam": lambda params, **form: optim.NAdam(params, weight_decay=0.1, **form),
    "RAdam": lambda params, **form: optim.RAdam(params, weight_decay=0.1, **form),
    "RMSprop": lambda params, **form: optim.RMSprop(
        params, momentum=0.5, centered=True, weight_decay=0.1, **form
    ),
    "Adagrad": lambda params, **form: optim.Adagrad(
        params, lr_decay=0.1, weight_decay=0.1, **form
    ),
    "Adamax": lambda params, **form: optim.Adamax(params, weight_decay=0.1, **form),
}
FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def supports(kind, form):
    """Return whether torch has an optimizer in a given form."""
    return form != "fused" or kind.split(",")[0].split()[0] in _FUSED


def make_params(device="cpu", *, complex_too=True):
    """Make the same parameters each time: large and small, of several layouts."""
    generator = torch.Generator().manual_seed(1)
    made = [
        torch.randn(size, generator=generator)
        for size in [(700_001,), (100, 77), (), (5,), (0, 3)]
    ]
    image = torch.randn(8, 3, 5, 5, generator=generator)
    made.append(image.to(memory_format=torch.channels_last))
    # Its elements are not contiguous.
    made.append(torch.randn(40, 6, generator=generator)[::2])
    if complex_too:
        made.append(torch.randn(9, generator=generator, dtype=torch.complex64))
    return [torch.nn.Parameter(tensor.to(device)) for tensor in made]


def give_gradients(params, others, seed):
    """Give two lists of parameters the same gradients; some get none."""
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        grad = torch.empty_like(param).copy_(grad)
        param.grad = None if index % 4 == 3 and seed % 2 else grad
    for param, other in zip(params, others, strict=False):
        other.grad = None if param.grad is None else param.grad.clone()


def equal(params, others):
    """Return whether parameters have the same bits."""
    return all(map(same_bits, params, others))


def same_bits(one, other):
    """Return whether two tensors have the same dtype, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = [each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)


def state_equal(one, other, *, strided=True):
    """Return whether two states have the same tensors and numbers in the same order."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or not same_bits(one, other):
            return False
        return not strided or one.stride() == other.stride()
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            state_equal(value, other[key], strided=strided) for key, value in one.items()
        )
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(
            state_equal(*each, strided=strided) for each in pairs
        )
    return one == other


def offload_in(folder):
    """Offload an optimizer, and report the result; Python's end cleans up."""
    try:
        global optimizer
        optimizer = nvmeio.torch.offload(optim.AdamW(make_params()), folder)
    except OSError as error:
        report([type(error).__name__, "process" in str(error)])
    else:
        report(["ok", any(".states." in name for name in os.listdir(folder))])


def step_and_wait(folder):
    """Take a step, and wait to be killed."""
    params = make_params()
    optimizer = nvmeio.torch.offload(optim.AdamW(params), folder, memory="8MiB")
    give_gradients(params, params, 0)
    optimizer.step()
    pause()


def offload_and_fork(folder):
    """Offload an optimizer; a child tries to use it, and ends."""
    params, others = make_params(), make_params()
    optimizer = nvmeio.torch.offload(optim.AdamW(params), folder)
    ordinary = optim.AdamW(others)
    for number in range(2):
        give_gradients(params, others, number)
        ordinary.step()
        optimizer.step()
        if number == 0:
            reader, writer = os.pipe()
            if os.fork() == 0:
                try:
                    optimizer.step()
                except RuntimeError as error:
                    os.write(writer, str(error).encode())
                # The child's end removes nothing.
                raise SystemExit
            os.wait()
            words = os.read(reader, 1000).decode()
    files = sum(".states." in name for name in os.listdir(folder))
    report({"words": words, "files": files, "equal": equal(params, others)})


def _memory(name):
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found[name].split()[0]) << 10


def _memory_from_here():
    """Return the memory of the process, and reset its maximum."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _memory("VmRSS")


def measure_growth(folder, form, memory):
    """Report by how many bytes a process grows while each kind takes two steps."""
    torch.set_num_threads(1)
    # Their states exceed `memory` plus the growth that is allowed besides.
    params = [torch.nn.Parameter(torch.ones(2 << 20)) for _ in range(5)]
    params.append(torch.nn.Parameter(torch.ones(10 << 20)))
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    found = {}
    for kind, make in KINDS.items():
        # What the other kinds allocate besides their states differs only with foreach.
        if not supports(kind, form) or (form == "loop" and kind not in _FUSED):
            continue
        small = torch.nn.Parameter(torch.ones(10))
        small.grad = torch.ones(10)
        make([small], **FORMS[form]).step()
        before = _memory_from_here()
        with (
            tempfile.TemporaryDirectory(dir=folder) as inside,
            nvmeio.torch.offload(
                make(params, **FORMS[form]), inside, memory=memory
            ) as optimizer,
        ):
            if kind == "Adagrad":
                # torch has already made its states.
                before = _memory_from_here()
            optimizer.step()
            # All states move to other offsets.
            optimizer.param_groups[0]["params"].reverse()
            optimizer.step()
        found[kind] = _memory("VmHWM") - before
    report(found)


def measure_loading(folder, memory):
    """Report by how many bytes a process grows while it loads one parameter's states."""
    torch.set_num_threads(1)
    param = torch.nn.Parameter(torch.ones(3000, 4000))
    inner = optim.AdamW([param])
    saved = inner.state_dict()
    # Their elements have another order than the parameter's.
    states = {
        name: torch.arange(12e6, dtype=torch.float).view(4000, 3000).t()
        for name in ("exp_avg", "exp_avg_sq")
    }
    saved["state"] = {0: {"step": torch.tensor(1.0), **states}}
    with nvmeio.torch.offload(inner, folder, memory=memory) as optimizer:
        before = _memory_from_here()
        optimizer.load_state_dict(saved)
        growth = _memory("VmHWM") - before
        found = optimizer.state[param]
        same = all(torch.equal(found[name], value) for name, value in states.items())
    report({"growth": growth, "same": same})
