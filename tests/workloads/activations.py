"""Training steps with and without saved tensors on disk."""

import contextlib
import errno
import gc
import os
import signal
import threading

import torch
import torch.distributed as dist

from nvmeio import File
from nvmeio.torch import save_on_disk
from nvmeio.torch._offload import slots as _slots
from workloads.common import Faults, pause, report

# Nearly all tensors of the tests are at least this large.
SMALL = 2048


def bytes_on_disk():
    """Return the size of the largest file of slots that this process has open, or 0."""
    sizes = [0]
    for each in list(_slots._live):
        # It is closed in a child, and while its last reference goes.
        with contextlib.suppress(ValueError):
            sizes.append(os.fstat(each._file.fileno()).st_size)
    return max(sizes)


def bits(tensor):
    """Return the bytes of a tensor in C order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


def same_bits(found, expected):
    """Return whether two lists of tensors are identical to the bit."""
    pairs = zip(found, expected, strict=True)
    return all(
        (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
        for one, other in pairs
    )


def gradients(model):
    """Return a copy of the gradients."""
    return [parameter.grad.clone() for parameter in model.parameters()]


def trained(model, batches, context, steps):
    """Return the losses and the weights of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        with context():
            loss = model(batches[step % len(batches)]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def mlp(context, steps):
    """Train layers with dropout, normalization and activations in place."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(inplace=True),
        torch.nn.LayerNorm(256),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(256, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 64),
    )
    return trained(model, torch.randn(2, 100, 64), context, steps)


class Block(torch.nn.Module):
    """Attention whose queries, keys and values are views of one tensor."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x):
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        views = (
            part.view(split).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


def transformer(context, steps):
    """Train a few blocks of attention."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Block(64, 4) for _ in range(3)))
    return trained(model, torch.randn(2, 2, 48, 64), context, steps)


def train_together(folder):
    """Train by DDP, with the context and without."""
    disk = []

    def trained_by_ddp(context):
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(Block(64, 4), Block(64, 4), torch.nn.BatchNorm1d(48))
        )
        model.register_forward_hook(lambda *_: disk.append(bytes_on_disk()))
        torch.manual_seed(dist.get_rank())
        return trained(model, torch.randn(2, 2, 48, 64), context, 5)

    expected = trained_by_ddp(contextlib.nullcontext)
    found = trained_by_ddp(lambda: save_on_disk(folder, min_bytes=SMALL, memory=0))
    return {
        "same": same_bits(found, expected),
        "on disk": min(disk[5:]) > 0 == max(disk[:5]),
    }


def train_beside_workers(folder):
    """Train on the batches of forked workers, which start while a context is active."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    inputs = torch.randn(64, 64)
    disk = []

    def trained_by_loader(context):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU())
        x = torch.randn(32, 64, requires_grad=True)
        with context:
            # Tensors saved before the fork, and while workers live.
            losses = [model(x * 2).square().mean()]
            loader = torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(inputs),
                batch_size=16,
                num_workers=2,
                persistent_workers=True,
                multiprocessing_context="fork",
            )
            for _ in range(2):
                losses += [model(batch).square().mean() for (batch,) in loader]
            disk.append(bytes_on_disk())
        sum(losses).backward()
        del losses
        gc.collect()
        workers = [worker.pid for worker in loader._iterator._workers]
        # The workers still live, and may have the file open.
        left = [
            os.stat(f"/proc/{pid}/fd/{name}").st_size
            for pid in workers
            for name in os.listdir(f"/proc/{pid}/fd")
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(folder)
        ]
        return [x.grad, *gradients(model)], sum(left)

    expected, _ = trained_by_loader(contextlib.nullcontext())
    context = save_on_disk(folder, min_bytes=SMALL, memory="100KiB")
    found, left = trained_by_loader(context)
    report(
        {
            "same": same_bits(found, expected),
            "on disk": disk[0] == 0 < disk[1],
            "left": left,
        }
    )


def train_in_a_child(folder):
    """Fork while a context is active; the child trains too, and its parent goes on."""
    torch.set_num_threads(1)
    x = torch.randn(4000, requires_grad=True)

    def forward():
        y = x
        for _ in range(10):
            y = y.sin().exp()
        return y.sum()

    (expected,) = torch.autograd.grad(forward(), x)
    with save_on_disk(folder, min_bytes=SMALL, memory=20_000):
        before = forward()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            said = []
            (found,) = torch.autograd.grad(forward(), x)
            said.append("same" if torch.equal(found, expected) else "other")
            try:
                torch.autograd.grad(before, x)
            except RuntimeError as error:
                said.append("before a fork" if "before a fork()" in str(error) else "else")
            os.write(writing, " and ".join(said).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reading, 100).decode().split(" and ")
        after = forward()
    grads = [torch.autograd.grad(loss, x)[0] for loss in (before, after)]
    report({"child": said, "parent": same_bits(grads, [expected] * 2)})


def ctrl_c_while_training(folder, when):
    """Press Ctrl-C while the drive holds I/O that a pass waits for; then train again."""
    torch.set_num_threads(1)
    faults = Faults(f"{folder}/control")
    # Only I/O by threads can be held by FUSE, which also loses unnamed files.
    os.environ["NVMEIO_ENGINE"] = "threads"
    _slots.unnamed_file = lambda folder: File(f"{folder}/slots", "w")
    x = torch.randn(40_000, requires_grad=True)

    def forward():
        y = x
        for _ in range(10):
            y = y.sin().exp()
        return y.sum()

    def press():
        faults.await_waiting()
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(call):
        presser = threading.Thread(target=press)
        presser.start()
        try:
            call()
        except KeyboardInterrupt:
            held.append(faults.waiting() > 0)
            faults.set()
            presser.join()
            raise

    held, came = [], False
    (expected,) = torch.autograd.grad(forward(), x)
    context = save_on_disk(folder, min_bytes=SMALL, memory="200KiB")
    try:
        if when == "forward":
            faults.set(write={"held": True})
            with context:
                interrupted(forward)
        else:
            with context:
                loss = forward()
            faults.set(read={"held": True})
            interrupted(loss.backward)
    except KeyboardInterrupt:
        came = True
    loss = None
    gc.collect()
    files = len(_slots._live)
    with save_on_disk(folder, min_bytes=SMALL, memory=0):
        (found,) = torch.autograd.grad(forward(), x)
    report(
        {
            "interrupted": came,
            "held": held == [True],
            "files": files,
            "same": torch.equal(found, expected),
        }
    )


def train_with_faults(folder):
    """Take a step while system calls fail."""
    x = torch.randn(4000, requires_grad=True)
    outcome = {"where": "forward", "outcome": "ok"}
    pause()
    try:
        with save_on_disk(folder, min_bytes=SMALL, memory=40_000):
            y = x
            for _ in range(10):
                y = y.sin().exp()
            loss = y.sum()
        outcome["where"] = "backward"
        loss.backward()
    except OSError as error:
        outcome |= {"outcome": errno.errorcode[error.errno], "filename": error.filename}
    y = loss = None
    gc.collect()
    report({**outcome, "left": bytes_on_disk() + len(_slots._live)})


def train_in_bfloat16(folder):
    """Train under autocast, with the vector width set, because sums depend on it."""
    torch.set_num_threads(1)
    disk = []

    def step(context):
        torch.manual_seed(1)
        model = torch.nn.Sequential(Block(64, 4), Block(64, 4))
        x = torch.randn(2, 48, 64, requires_grad=True)
        with context, torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
            disk.append(bytes_on_disk())
        loss.backward()
        return [loss, x.grad, *gradients(model)]

    expected = step(contextlib.nullcontext())
    found = step(save_on_disk(folder, min_bytes=SMALL, memory=0))
    report({"same": same_bits(found, expected), "on disk": disk[0] == 0 < disk[1]})


def leave_in_a_child(folder):
    """Fork while tensors are being written; the child leaves by an exception."""
    x = torch.randn(400_000, requires_grad=True)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    child = 0
    try:
        with save_on_disk(folder, min_bytes=SMALL):
            loss = x.sin().exp().sum()
            child = os.fork()
            if not child:
                raise ValueError
    except ValueError:
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (found,) = torch.autograd.grad(loss, x)
    report({"child": status, "parent": torch.equal(found, expected)})


def grow_by_memory(folder, mebibytes):
    """Take a step that saves 768 MiB, and report by how much the process has grown."""
    torch.set_num_threads(1)
    x = torch.randn(mebibytes << 18, requires_grad=True)
    (x[:9] * 2).sum().backward()
    before = mebibytes_of("VmRSS")
    with save_on_disk(folder, memory="64MiB"):
        y = x
        for _ in range(256 // mebibytes):
            y = y.sin() * y.cos()
    y.sum().backward()
    # Not ru_maxrss, which starts at the parent's.
    report(mebibytes_of("VmHWM") - before)


def mebibytes_of(name):
    """Return a figure of this process's memory, from the kernel, in MiB."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) >> 10
