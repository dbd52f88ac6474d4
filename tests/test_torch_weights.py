"""Models whose weights are on a drive: the same results, in bounded memory."""

import contextlib
import copy
import errno
import gc
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

import nvmeio.safetensors.torch as st
import nvmeio.torch
from children import run_child
from helpers import descriptors_below
from nvmeio.safetensors import SafetensorError
from nvmeio.torch._weights import store
from nvmeio.torch._weights.lazy import LazyTensor, arranged
from nvmeio.torch._weights.order import Order

WIDTH = 64
KIB = 1024


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer, and a buffer."""

    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False).eval()
        self.embed = nn.Embedding(50, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH).eval()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        ids = (x.detach().abs().sum(-1) * 7).long() % 50
        return self.head(self.norm(self.embed(ids) + x))


class Reading(nn.Module):
    """Uses weights without calling their modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x.to(self.second.weight.dtype) @ self.first.weight.T[:, : WIDTH // 2]
        scale = self.second.weight[3:5].abs().mean() + self.first.bias.max()
        return torch.addmm(self.second.bias[:5], x, self.second.weight[:5, ::2].t()) * scale


class Function(torch.autograd.Function):
    """Keeps a weight as an attribute."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.t(), None


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return Function.apply(x, self.weight)


def encoder():
    return nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, 0.0, batch_first=True)


MODELS = {
    "linear": lambda: nn.Sequential(
        *(each for _ in range(6) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    ),
    "tied": Tied,
    "reading": Reading,
    "own function": Own,
    "encoder": lambda: nn.Sequential(encoder(), encoder(), encoder()),
    "norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 8, 3), nn.ConvTranspose1d(8, 4, 3)
    ),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(WIDTH, 32, 2)]),
}


def call(model, x):
    found = model[0](x) if isinstance(model, nn.ModuleList) else model(x)
    return found[0] if isinstance(found, tuple) else found


def made(name, folder, dtype=torch.float32):
    """Make a model, save it, and return it with the path and an input."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).requires_grad_(False).eval()
    path = folder / "model.safetensors"
    st.save_model(model, path)
    x = torch.randn(12, WIDTH, dtype=dtype)
    if name == "encoder":
        x = x.view(2, 6, WIDTH)
    return model, path, x


def least(model, path, **options):
    with pytest.raises(ValueError, match=r"must be \d+ bytes") as caught:
        nvmeio.torch.disk_offload(model, path, memory=0, **options)
    return int(str(caught.value).split("must be ")[1].split()[0])


def results(model, x):
    """Return the output and the gradient of the input."""
    x = x.clone().requires_grad_()
    found = call(model, x)
    found.float().square().sum().backward()
    return found.detach(), x.grad


def store_of(model):
    return next(model.parameters()).store


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same_to_the_bit(tmp_path, monkeypatch, name, dtype, share):
    """Outputs, and gradients through the weights, with any amount of memory."""
    # Torch's own bfloat16 kernels of oneDNN may use instructions that a machine lacks.
    if dtype == torch.bfloat16 and name == "recurrent":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    model, path, x = made(name, tmp_path, dtype)
    expected = results(model, x)
    with torch.no_grad():
        alone = call(model, x)
    low = least(model, path)
    total = sum(each.nbytes for each in model.parameters())
    memory = max(low, int(low + share * total))
    assert nvmeio.torch.disk_offload(model, path, memory=memory) is model
    for _ in range(3):
        assert_equal(results(model, x), expected)
        with torch.no_grad():
            assert torch.equal(call(model, x), alone)
            if not isinstance(model, nn.ModuleList):
                # Without __call__, and so without hooks.
                found = model.forward(x)
                assert torch.equal(found[0] if isinstance(found, tuple) else found, alone)
        with torch.inference_mode():
            assert torch.equal(call(model, x), alone)
    stats = nvmeio.torch.disk_stats(model)
    assert stats["bytes_peak"] <= memory
    assert stats["bytes_total"] == total
    if share == 1:
        assert stats["bytes_read"] == total
    elif share == 0 and total > 2 * low:
        assert stats["bytes_read"] > total
    nvmeio.torch.remove_disk_offload(model)
    assert_equal(results(model, x), expected)
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_a_model_without_memory_is_used(tmp_path):
    model, path, x = made("linear", tmp_path)
    with torch.device("meta"):
        empty = MODELS["linear"]()
    nvmeio.torch.disk_offload(empty, path, memory="1MiB")
    assert_equal(results(empty, x), results(model, x))


def test_the_checkpoint_may_have_several_files(tmp_path):
    model, _, x = made("encoder", tmp_path)
    nvmeio.safetensors.save_sharded(model.state_dict(), tmp_path / "folder", 40 * KIB)
    expected = results(model, x)
    nvmeio.torch.disk_offload(model, tmp_path / "folder", memory="1MiB")
    assert_equal(results(model, x), expected)
    assert len(descriptors_below(tmp_path)) > 1
    del model
    gc.collect()
    assert descriptors_below(tmp_path) == []


def test_weights_are_converted(tmp_path):
    model, path, x = made("linear", tmp_path)
    expected = results(copy.deepcopy(model).to(torch.bfloat16), x.bfloat16())
    low = least(model, path, dtype=torch.bfloat16)
    nvmeio.torch.disk_offload(model, path, memory=low, dtype=torch.bfloat16)
    assert_equal(results(model, x.bfloat16()), expected)
    assert nvmeio.torch.disk_stats(model)["bytes_peak"] <= low


class Adapted(nn.Module):
    """A frozen layer and a small one that is trained, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return torch.relu(self.base(x) + self.up(self.down(x)))


class Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(5))
        self.again = self.calls = 0
        # What each layer is computed in.
        self.within = contextlib.nullcontext

    def forward(self, x):
        for layer in self.layers:
            x = (
                checkpoint(self.one, layer, x, use_reentrant=False)
                if self.again
                else self.one(layer, x)
            )
        return x

    def one(self, layer, x):
        self.calls += 1
        with self.within():
            return layer(x)


def trained(model, x, context):
    """Train for ten steps; return all gradients."""
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    found = []
    for _ in range(10):
        with context():
            loss = model(x).float().square().mean()
        loss.backward()
        found += [each.grad for each in weights]
        optimizer.step()
        optimizer.zero_grad()
    return found


CONTEXTS = {
    "plain": lambda folder: torch.enable_grad,
    "save_on_disk": lambda folder: (
        lambda: nvmeio.torch.save_on_disk(folder, min_bytes=0, memory=0)
    ),
    "save_on_cpu": lambda folder: torch.autograd.graph.save_on_cpu,
    "autocast": lambda folder: lambda: torch.autocast("cpu", torch.bfloat16),
    "bfloat16": lambda folder: torch.enable_grad,
}


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpoint"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_adapters_are_trained_as_with_weights_in_memory(
    tmp_path, monkeypatch, context, again
):
    """Autograd keeps no weights, and other hooks keep what they kept."""
    if context in ("autocast", "bfloat16"):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    dtype = torch.bfloat16 if context == "bfloat16" else torch.float32
    torch.manual_seed(0)
    model = Adapters().to(dtype)
    model.again = again
    base = {name: each for name, each in model.state_dict().items() if ".base." in name}
    st.save_file(base, tmp_path / "base.safetensors")
    for layer in model.layers:
        layer.base.requires_grad_(False)
    other, x = copy.deepcopy(model), torch.randn(8, WIDTH, dtype=dtype)
    enter = CONTEXTS[context](tmp_path)
    expected = trained(other, x, enter)
    low = least(model, tmp_path / "base.safetensors")
    nvmeio.torch.disk_offload(model, tmp_path / "base.safetensors", memory=low)
    assert_equal(trained(model, x, enter), expected)
    assert model.calls == other.calls
    assert (
        nvmeio.torch.disk_stats(model)["bytes_peak"]
        <= low
        < 3 * base["layers.0.base.weight"].nbytes
    )


def whole(model):
    """Return a function that computes a model again in the backward pass."""
    return lambda x: checkpoint(model, x, use_reentrant=False)


# Where the layers are checkpointed, where save_on_disk is, and whether all is once more.
NESTINGS = [
    ("layer", "outside", False),
    ("layer", "inside", False),
    ("layer", "inside", True),
    ("no", "inside", True),
    ("no", "outside", True),
    ("no", "inside", False),
]


@pytest.mark.parametrize(("again", "saved", "all_again"), NESTINGS)
def test_weights_nest_with_save_on_disk_and_checkpoint(tmp_path, again, saved, all_again):
    torch.manual_seed(0)
    model = Adapters()
    base = {name: each for name, each in model.state_dict().items() if ".base." in name}
    path = tmp_path / "base.safetensors"
    st.save_file(base, path)
    for layer in model.layers:
        layer.base.requires_grad_(False)
    disk = CONTEXTS["save_on_disk"](tmp_path)
    model.again = again == "layer"
    outside = disk if saved == "outside" else contextlib.nullcontext
    other, x = copy.deepcopy(model), torch.randn(8, WIDTH)
    gradients = []
    low = least(model, path)
    nvmeio.torch.disk_offload(model, path, memory=low)
    for each in (model, other):
        # Not before, because copy.deepcopy() would ask for it.
        each.within = disk if saved == "inside" else contextlib.nullcontext
        with outside():
            loss = (whole(each) if all_again else each)(x).square().mean()
        loss.backward()
        gradients.append([p.grad for p in each.parameters() if p.requires_grad])
    assert_equal(*gradients)
    assert model.calls == other.calls
    assert nvmeio.torch.disk_stats(model)["bytes_peak"] <= low


def test_values_lie_at_multiples_of_64(tmp_path):
    """As torch allocates them: at others, a float32 Linear of one row has other bits."""
    state = {f"{n}": torch.ones(n) for n in range(1, 9)}
    st.save_file({"first": torch.ones(1, dtype=torch.uint8), **state}, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "a.safetensors")
    model = nn.ParameterDict({name: nn.Parameter(each) for name, each in state.items()})
    with pytest.warns(RuntimeWarning, match="the model has no first"):
        nvmeio.torch.disk_offload(model, tmp_path / "a.safetensors", memory="1MiB")
    held = [each.values() for each in model.values()]
    assert [each.data_ptr() % 64 for each in held] == [0] * 8
    assert all(each.eq(1).all() for each in held)


def test_second_derivatives_are_the_same(tmp_path):
    model, path, x = made("linear", tmp_path)

    def second(model):
        start = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(start).pow(3).sum(), start, create_graph=True)
        return torch.autograd.grad(first.square().sum(), start)

    expected = second(model)
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    assert_equal(second(model), expected)


TRANSFORMS = {
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "grad of each": lambda model, x: torch.func.vmap(
        torch.func.grad(lambda row: model(row).square().sum())
    )(x),
    "jvp": lambda model, x: torch.stack(torch.func.jvp(model, (x,), (x,))),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](x)[0],
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_functions_give_the_same(tmp_path, transform):
    model, path, x = made("linear", tmp_path)
    expected = transform(model, x)
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    assert torch.equal(transform(model, x), expected)


WRITES = {
    "to": (lambda model, state: model.to(torch.float64), "converted.*; name .* as dtype="),
    "half": (lambda model, state: model.half(), "converted"),
    "half of a part": (lambda model, state: model.embed.half(), "converted"),
    "to empty": (lambda model, state: model.to_empty(device="cpu"), "replaced"),
    "to meta": (
        lambda model, state: model.to("meta"),
        "moved from cpu to meta; name the device that computes as execution_device=",
    ),
    "load": (lambda model, state: model.load_state_dict(state), "loaded"),
    "assign": (lambda model, state: model.load_state_dict(state, assign=True), "loaded"),
    "load a part": (
        lambda model, state: model.head.load_state_dict({"weight": torch.ones(50, WIDTH)}),
        "loaded",
    ),
    "init": (lambda model, state: nn.init.normal_(model.head.weight), "changed by"),
    "reset": (lambda model, state: model.head.reset_parameters(), "changed by"),
    "item": (lambda model, state: model.head.weight.__setitem__(0, 1), "changed by"),
    "view": (lambda model, state: model.head.weight[1:3].zero_(), "changed by"),
    "transposed": (lambda model, state: model.head.weight.t().add_(1), "changed by"),
    "detached": (lambda model, state: model.head.weight.detach().add_(1), "changed by"),
    "data": (lambda model, state: model.head.weight.data.mul_(2), "changed by"),
    "set data": (
        lambda model, state: setattr(model.head.weight, "data", torch.ones(50, WIDTH)),
        "changed through .data",
    ),
    "out": (
        lambda model, state: torch.add(
            torch.ones(50, WIDTH), 1, out=model.head.weight.detach()
        ),
        "changed by",
    ),
    "part": (lambda model, state: model.head.weight.unfold(0, 2, 2).add_(1), "changed by"),
    "split": (lambda model, state: model.head.weight.split(5)[1].add_(1), "changed by"),
    "unbound": (lambda model, state: model.head.weight.unbind()[1].add_(1), "changed by"),
    "foreach": (lambda model, state: torch._foreach_add_([model.head.weight], 1), "by"),
    "train": (lambda model, state: model.requires_grad_(True), "trained"),
    "train one": (lambda model, state: model.head.weight.requires_grad_(), "trained"),
    "share": (lambda model, state: model.share_memory(), "shared memory"),
    "address": (lambda model, state: model.head.weight.data_ptr(), "address"),
    "DLPack": (lambda model, state: torch.from_dlpack(model.head.weight), "DLPack"),
    "DLPack of numpy": (lambda model, state: np.from_dlpack(model.head.weight), "DLPack"),
    "shallow copy": (lambda model, state: copy.copy(model.head.weight).zero_(), "changed"),
}


@pytest.mark.parametrize("write", WRITES)
def test_changes_are_refused_before_anything_is_changed(tmp_path, write):
    model, path, x = made("tied", tmp_path)
    expected, buffers = results(model, x), copy.deepcopy(list(model.buffers()))
    state = {name: each + 1 for name, each in model.state_dict().items()}
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    change, words = WRITES[write]
    with pytest.raises(
        RuntimeError, match=f"on a drive, and cannot be .*{words}"
    ) as caught:
        change(model, state)
    assert "remove_disk_offload" in str(caught.value)
    assert_equal(model.buffers(), buffers)
    assert_equal(results(model, x), expected)


COLLECTIVES = {
    "all_reduce": torch.distributed.all_reduce,
    "broadcast": lambda weight: torch.distributed.broadcast(weight.data, 0),
}


@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
def test_collective_operations_are_refused(tmp_path, mesh, collective):
    """They change the values in place; torch has no word of that in their schemas."""
    model, path, x = made("tied", tmp_path)
    expected = results(model, x)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    words = r"embed\.weight is on a drive, and cannot be changed by c10d"
    with pytest.raises(RuntimeError, match=words):
        collective(model.head.weight)
    assert_equal(results(model, x), expected)


def test_what_bypasses_the_parameter_gets_no_address(tmp_path):
    model, path, _ = made("tied", tmp_path)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    for found in (model.head.weight, model.head.weight.t(), model.head.weight[1]):
        for ask in (torch.utils.dlpack.to_dlpack, torch.Tensor.data_ptr):
            with pytest.raises(RuntimeError, match="data pointer"):
                ask(found)


def test_between_calls_a_parameter_says_what_it_is(tmp_path):
    model, path, _ = made("tied", tmp_path)
    weight = model.head.weight.clone()
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    found = model.head.weight
    assert isinstance(found, nn.Parameter)
    assert found is model.embed.weight
    assert (found.shape, found.dtype, found.device) == (
        weight.shape,
        weight.dtype,
        weight.device,
    )
    assert (found.stride(), found.nbytes, found.requires_grad) == (
        weight.stride(),
        weight.nbytes,
        False,
    )
    assert nvmeio.torch.disk_stats(model)["bytes_read"] == 0
    assert repr(found) == (
        "DiskParameter('embed.weight', shape=(50, 64), dtype=torch.float32)"
    )
    assert sorted(model.state_dict()) == sorted(made("tied", tmp_path)[0].state_dict())
    assert found.tolist() == weight.tolist()
    assert not found.numpy().flags.writeable
    parts = found.chunk(4, 1)
    assert_equal([each.clone() for each in parts], weight.chunk(4, 1))
    assert torch.equal(torch.from_numpy(found.numpy().copy()), weight)
    # As torch.save and a queue send it.
    assert torch.equal(pickle.loads(pickle.dumps(found)), weight)
    assert model.to("cpu") is model
    assert model.float() is model
    with pytest.raises(ValueError, match=r"is on a drive, .*remove_disk_offload"):
        st.save_file(model.state_dict(), tmp_path / "other.safetensors")


def test_print_says_what_is_on_the_drive(tmp_path):
    model, path, _ = made("linear", tmp_path)
    before = repr(model)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    assert repr(model).count("on a drive") == before.count("Linear(")
    nvmeio.torch.remove_disk_offload(model)
    assert repr(model) == before


@pytest.mark.parametrize("kept", [6, 12, 15])
def test_a_pass_reads_only_what_has_no_room(tmp_path, kept):
    """And what is read ahead meanwhile, at most a quarter of the memory or two weights."""
    layers = 16
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
    path = tmp_path / "model.safetensors"
    st.save_file(model.state_dict(), path)
    size = 64 * 64 * 4
    nvmeio.torch.disk_offload(model, path, memory=kept * size)
    read = []
    for _ in range(5):
        model(torch.ones(1, 64))
        read.append(nvmeio.torch.disk_stats(model)["bytes_read"] // size)
    for before, after in itertools.pairwise(read[1:]):
        assert after - before <= layers - kept + max(2, kept // 4) + 1


def test_stats_count_every_use(tmp_path):
    model, path, x = made("linear", tmp_path)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    uses = len(list(model.parameters()))
    call(model, x)
    first = nvmeio.torch.disk_stats(model)
    # The first layer, before anything is known; then it is read ahead.
    assert first["waits_demanded"] == 2
    assert first["hits"] + first["waits_ahead"] == uses - 2
    assert first["seconds_waited"] > 0
    call(model, x)
    assert nvmeio.torch.disk_stats(model) == {**first, "hits": first["hits"] + uses}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compilers_are_refused(tmp_path):
    model, path, x = made("linear", tmp_path)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    for module in (model, model[0]):
        with pytest.raises(RuntimeError, match=r"0\.weight is on a drive, .* compiled"):
            module.compile()
    # Torch 2.9 compiles what reads the weight, and fails there.
    words = (
        "weight is on a drive" if torch.__version__ >= (2, 10) else "bias cannot be read"
    )
    with pytest.raises(RuntimeError, match=rf"the weight 0\.{words}"):
        torch.compile(model)(x)
    for compiled in (
        lambda x: torch.export.export(model, (x,)),
        # Its file would have no values.
        lambda x: torch.jit.trace(model, x),
        lambda x: torch.jit.script(model),
    ):
        with pytest.raises(RuntimeError, match=r"the weight 0\.weight is on a drive"):
            compiled(x)
    call(model, x)


def test_a_copy_has_the_same_weights(tmp_path):
    model, path, x = made("linear", tmp_path)
    expected = results(model, x)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    other = copy.deepcopy(model)
    nvmeio.torch.remove_disk_offload(model)
    assert_equal(results(other, x), expected)
    with pytest.raises(RuntimeError, match="converted"):
        other.half()
    assert model.half()[0].weight.dtype == torch.float16
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(other)


def test_what_the_program_holds_is_named_when_memory_is_short(tmp_path):
    model, path, x = made("linear", tmp_path)
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    held = [model[0].weight.numpy(), model[2].weight.numpy()]
    expected = [each.copy() for each in held]
    with pytest.raises(
        RuntimeError, match=r"the program holds 0\.weight, 2\.weight, or .*; release"
    ):
        model(x)
    # They were not overwritten.
    for one, other in zip(held, expected, strict=True):
        assert np.array_equal(one, other)
    del one
    held.clear()
    model(x)


REFUSED = {
    "no module": ({"model": 3}, TypeError, "model is of type int; it must be a Module"),
    "dtype": ({"dtype": "float"}, TypeError, "dtype is 'float'; it must be a dtype"),
    "memory": ({"memory": "much"}, ValueError, "memory is 'much'"),
    "another model": (
        {"model": nn.Linear(3, 3)},
        ValueError,
        r"has no parameter of the model; its names are 0\.bias, 0\.weight, .*, and the "
        "model's weight, bias",
    ),
    "device": (
        {"execution_device": "gpu"},
        ValueError,
        "execution_device is 'gpu', and torch knows no such device",
    ),
    "missing": (
        {"model": nn.Sequential(nn.Linear(64, 64), nn.Bilinear(3, 3, 3, device="meta"))},
        ValueError,
        r"lacks 1\.weight, 1\.bias, which the model has on the meta device; make the model "
        r"in memory, or one of transformers by load_disk_offload\(\)",
    ),
    "shape": (
        {"model": nn.Sequential(nn.Linear(64, 65))},
        ValueError,
        r"0\.weight has the shape \(64, 64\) in .*, and \(65, 64\) in the model",
    ),
    "file": ({"checkpoint": "none.safetensors"}, FileNotFoundError, "none"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_arguments_are_refused(tmp_path, kind):
    model, path, x = made("linear", tmp_path)
    change, error, words = REFUSED[kind]
    arguments = {"model": model, "checkpoint": path, "memory": "1MiB", **change}
    with pytest.raises(error, match=words):
        nvmeio.torch.disk_offload(**arguments)
    assert descriptors_below(tmp_path) == []
    model(x)


@pytest.fixture
def mesh():
    """Return a mesh of one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def wrapped(model, mesh, **options):
    fsdp = torch.distributed.fsdp.FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fsdp(model, device_id=torch.device("cpu"), **options)


DISTRIBUTED = {
    "fully_shard": (
        lambda model, mesh: torch.distributed.fsdp.fully_shard(model, mesh=mesh),
        r"0\.weight is a DTensor, distributed over ranks",
    ),
    "DTensor": (torch.distributed.tensor.distribute_module, r"0\.weight is a DTensor"),
    "FSDP": (wrapped, "the model is wrapped by FullyShardedDataParallel"),
    "DDP": (
        lambda model, mesh: nn.parallel.DistributedDataParallel(model.requires_grad_()),
        "the model is wrapped by DistributedDataParallel; pass the model within",
    ),
    "torch.compile": (
        lambda model, mesh: torch.compile(model),
        "the model is wrapped by OptimizedModule; pass the model within",
    ),
}


@pytest.mark.parametrize("how", DISTRIBUTED)
def test_a_wrapped_or_distributed_model_is_refused(tmp_path, mesh, how):
    model, path, _ = made("linear", tmp_path)
    distribute, words = DISTRIBUTED[how]
    model = distribute(model, mesh) or model
    before = [type(each) for each in model.parameters()]
    with pytest.raises(ValueError, match=words):
        nvmeio.torch.disk_offload(model, path, memory="1MiB")
    assert [type(each) for each in model.parameters()] == before


class Sided(nn.Module):
    """A model, and an adapter that is trained."""

    def __init__(self, model):
        super().__init__()
        self.model, self.adapter = model, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.model(x) + self.adapter(x)


def sided(folder):
    """Return an adapted model and its twin, whose frozen weights are on a drive."""
    model, path, x = made("linear", folder)
    st.save_file({f"model.{name}": v for name, v in model.state_dict().items()}, path)
    model = Sided(model)
    offloaded = nvmeio.torch.disk_offload(copy.deepcopy(model), path, memory="1MiB")
    return model, offloaded, x


def test_adapters_are_trained_by_ddp(tmp_path, mesh):
    model, offloaded, x = sided(tmp_path)
    for each in (model, offloaded):
        nn.parallel.DistributedDataParallel(each)(x).square().sum().backward()
    assert torch.equal(offloaded.adapter.weight.grad, model.adapter.weight.grad)
    kept = sorted(vars(model))
    other = copy.deepcopy(offloaded)
    nn.parallel.DistributedDataParallel(other)
    assert sorted(vars(nvmeio.torch.remove_disk_offload(offloaded))) == kept


def test_what_a_model_keeps_from_ddp_stays_so(tmp_path, mesh):
    name = "_ddp_params_and_buffers_to_ignore"
    ddp = nn.parallel.DistributedDataParallel
    model, path, _ = made("tied", tmp_path)
    model.adapter = nn.Linear(2, 2)
    own = ["statistics.running_mean", "adapter.bias"]
    ddp._set_params_and_buffers_to_ignore_for_model(model, own)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    other = copy.deepcopy(model)
    ignored = ddp(model).parameters_to_ignore
    assert ignored == ddp(other).parameters_to_ignore
    assert ignored.issuperset([*own, "embed.weight", "head.weight"])
    assert "adapter.weight" not in ignored
    for each in (model, other):
        nvmeio.torch.remove_disk_offload(each)
        assert vars(each)[name] == own


def test_fully_shard_brings_weights_to_memory(tmp_path, mesh):
    model, offloaded, x = sided(tmp_path)
    expected = model(x)
    torch.distributed.fsdp.fully_shard(offloaded, mesh=mesh)
    assert {type(each).__name__ for each in offloaded.parameters()} == {"DTensor"}
    assert torch.equal(offloaded(x), expected)


def test_fsdp_around_weights_on_a_drive_is_refused(tmp_path, mesh):
    """And leaves the model as it was."""
    model, offloaded, x = sided(tmp_path)
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"is on a drive, and cannot be changed"):
        wrapped(offloaded, mesh, use_orig_params=True)
    assert torch.equal(offloaded(x), expected)


def test_a_model_on_several_devices_is_refused(tmp_path):
    """But the CPU and the meta device may both have parameters."""
    model, path, x = made("linear", tmp_path)
    expected = results(model, x)
    several = copy.deepcopy(model)
    with torch._subclasses.FakeTensorMode():
        weight = torch.empty(WIDTH, WIDTH, device="cuda:1")
    several[2].weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"2\.weight is on cuda:1; it must be on cpu"):
        nvmeio.torch.disk_offload(several, path, memory="1MiB")
    assert not any(type(each).__name__ == "DiskParameter" for each in several.parameters())
    several[2] = nn.Linear(WIDTH, WIDTH, device="meta")
    nvmeio.torch.disk_offload(several, path, memory="1MiB")
    assert_equal(results(several, x), expected)


def test_a_folder_of_dcp_is_refused_without_safetensors_files(tmp_path):
    model, _, x = made("linear", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(
            model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True
        )
    with pytest.raises(ValueError, match=r"is a checkpoint of torch\.distributed"):
        nvmeio.torch.disk_offload(model, tmp_path / "dcp", memory="1MiB")
    expected = model(x)
    # Its safetensors files are used if it has some.
    st.save_file(model.state_dict(), tmp_path / "dcp" / "model.safetensors")
    nvmeio.torch.disk_offload(model, tmp_path / "dcp", memory="1MiB")
    assert torch.equal(model(x), expected)


def test_names_that_do_not_fit_are_told(tmp_path):
    model, path, x = made("linear", tmp_path)
    state = {name.replace("4.", "layers.4."): v for name, v in model.state_dict().items()}
    st.save_file(state, path)
    expected = results(model, x)
    words = r"has no layers\.4\.bias, layers\.4\.weight, .*; and 4\.weight, 4\.bias, which"
    with pytest.warns(RuntimeWarning, match=words) as caught:
        nvmeio.torch.disk_offload(model, path, memory="1MiB")
    assert caught[0].filename == __file__
    assert_equal(results(model, x), expected)
    assert type(model[4].weight) is nn.Parameter


def test_a_model_is_offloaded_once(tmp_path):
    model, path, _ = made("linear", tmp_path)
    with pytest.raises(ValueError, match="are not on a drive"):
        nvmeio.torch.disk_stats(model)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    with pytest.raises(ValueError, match="are on a drive already"):
        nvmeio.torch.disk_offload(nn.Sequential(model), path, memory="1MiB")
    with pytest.raises(ValueError, match="are on a drive already"):
        nvmeio.torch.disk_offload(model[0], path, memory="1MiB")


class Shared(nn.Module):
    """Has a module twice, a weight and a buffer in two modules, and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.first = self.again = nn.BatchNorm1d(WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight
        for each in (self.one, self.other):
            each.register_buffer("scale", self.first.running_var)
        self.register_buffer("own", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        x = self.one(self.first(x)) * self.one.scale + self.own
        return self.other(self.again(x)) * self.other.scale


@pytest.mark.parametrize("names", ["all", "first", "last"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_has_several_names_is_loaded_as_by_load_state_dict(tmp_path, names, device):
    """Also where the file has several values for it, or one for what is not saved."""
    torch.manual_seed(0)
    resident = Shared().eval()
    state = {
        name: torch.rand_like(v) for name, v in resident.state_dict().items() if v.dim()
    }
    for name in ("again.weight", "again.bias", "again.running_mean"):
        if names != "all":
            del state[name if names == "first" else name.replace("again", "first")]
    for kept, *others in [
        ("one.weight", "other.weight"),
        ("first.running_var", "again.running_var", "one.scale", "other.scale"),
    ]:
        for each in {"all": [], "first": others, "last": [kept, *others[:-1]]}[names]:
            del state[each]
    resident.load_state_dict(state, strict=False)
    st.save_file({**state, "own": torch.zeros(WIDTH)}, tmp_path / "model.safetensors")
    with torch.device(device):
        model = Shared().eval()
    if device == "meta":
        model.own = torch.ones(WIDTH)
        model.first.num_batches_tracked = torch.tensor(0)
    with pytest.warns(RuntimeWarning, match="the model has no own, which"):
        nvmeio.torch.disk_offload(model, tmp_path / "model.safetensors", memory="1MiB")
    assert model.one.scale is model.other.scale is model.first.running_var
    x = torch.randn(5, WIDTH)
    assert torch.equal(model(x), resident(x))


@pytest.mark.parametrize("change", ["cut", "rewritten", "unreadable"])
def test_a_file_that_changes_gives_an_error_and_no_results(tmp_path, monkeypatch, change):
    model, path, x = made("linear", tmp_path)
    expected = results(model, x)
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    results(model, x)
    content, before = path.read_bytes(), os.stat(path)
    if change == "cut":
        os.truncate(path, len(content) // 2)
        errors, words = (OSError, SafetensorError), "weight .* cannot be read"
    elif change == "rewritten":
        # Without truncation: what is read ahead just then would be past the end.
        with open(path, "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(bytes(8))
        errors, words = SafetensorError, "has changed while it was read"
    else:
        handle = nvmeio.default_handle()

        def failing(items):
            (memory, file, _), *_ = items
            return handle.submit_read(memory, file, 1 << 40)

        class Handle:
            submit_read_many = staticmethod(failing)

        monkeypatch.setattr(store, "default_handle", Handle)
        errors, words = OSError, "weight .* cannot be read"
    with pytest.raises(errors, match=words) as caught:
        [results(model, x) for _ in range(3)]
    if change == "unreadable":
        assert caught.value.errno == errno.ENODATA
        assert str(path) in str(caught.value)
        monkeypatch.undo()
    else:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    # The model is usable again.
    assert_equal(results(model, x), expected)


def test_what_was_read_ahead_during_a_failure_is_read_again(tmp_path, monkeypatch):
    """The first call that fails tells of it; the next one does not tell of it again."""
    model, path, x = made("linear", tmp_path)
    expected = results(model, x)
    nvmeio.torch.disk_offload(model, path, memory=path.stat().st_size)
    handle = nvmeio.default_handle()

    class Handle:
        def submit_read_many(self, items):
            request = handle.submit_read(items[0][0], items[0][1], 1 << 40)
            request.exception()
            return request

    monkeypatch.setattr(store, "default_handle", Handle)
    with pytest.raises(OSError, match="cannot be read") as caught:
        results(model, x)
    monkeypatch.undo()
    assert_equal(results(model, x), expected)
    del caught


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python looks for signals elsewhere")
def test_ctrl_c_anywhere_leaves_the_model_usable(tmp_path):
    """Its counts are right, and so are the rows of its table."""
    found = run_child("interrupt_weights", folder=str(tmp_path)).report
    assert found["left"] == {}
    assert found["came"] >= found["places"] / 2


def test_a_traceback_that_is_kept_holds_no_weights(tmp_path, monkeypatch):
    """As the interactive Python keeps that of the last error."""
    model, path, x = made("linear", tmp_path)
    expected = results(model, x)
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    kept = []
    with pytest.raises(RuntimeError, match="shape") as caught:
        model[0](x[:, 1:])
    kept.append(caught.value)
    assert_equal(results(model, x), expected)
    start = store._Reading.__init__

    def interrupted(*arguments):
        monkeypatch.undo()
        start(*arguments)
        raise KeyboardInterrupt

    for step in range(3):
        monkeypatch.setattr(store._Reading, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            model[2 * step :](x)
        kept.append(caught.value)
        assert_equal(results(model, x), expected)


def test_a_thread_reads_again_what_another_one_gave_up(tmp_path, monkeypatch):
    """Two wait for one read, of which the first is interrupted."""
    model, path, x = made("linear", tmp_path)
    expected = model[0](x)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    make, first, second = store._Reading._made, threading.Event(), threading.Event()

    def interrupted(reading):
        monkeypatch.setattr(store._Reading, "_made", make)
        first.set()
        assert second.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(store._Reading, "_made", interrupted)
    # By thread, because the second one may end first.
    found = {}

    def use(name):
        try:
            found[name] = model[0](x)
        except BaseException as error:
            found[name] = error

    one = threading.Thread(target=use, args=("one",))
    one.start()
    assert first.wait(60)
    reading = next(each.reading for each in store_of(model).weights if each.reading)
    other = threading.Thread(target=use, args=("other",))
    other.start()
    while len(reading.waiting) < 2:
        assert other.is_alive()
        time.sleep(0.001)
    second.set()
    one.join()
    other.join()
    assert isinstance(found["one"], KeyboardInterrupt)
    assert torch.equal(found["other"], expected)


def test_threads_use_a_model_at_the_same_time(tmp_path):
    model, path, x = made("linear", tmp_path)
    expected = results(model, x)
    low = least(model, path)
    nvmeio.torch.disk_offload(model, path, memory=3 * low)
    wrong = []

    def run():
        try:
            for _ in range(20):
                assert_equal(results(model, x), expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
    assert nvmeio.torch.disk_stats(model)["bytes_peak"] <= 3 * low


def test_a_model_that_is_gone_leaves_no_memory(tmp_path):
    """Also what was read ahead, and is still on its way."""
    gc.collect()
    before = nvmeio.pool_stats()["bytes_used"]
    model, path, x = made("linear", tmp_path)
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    model[:3](x)
    assert nvmeio.pool_stats()["bytes_used"] > before
    del model
    gc.collect()
    assert nvmeio.pool_stats()["bytes_used"] <= before


def test_a_model_that_is_gone_is_not_garbage(tmp_path):
    """Its memory and its files must not stay until that is collected."""
    model, path, x = made("linear", tmp_path)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    # Torch imports modules the first time, which keep frames for a while.
    model(x)
    twin = copy.deepcopy(model)
    gc.collect()
    gc.disable()
    try:
        model(x)
        twin(x)
        del model
        with pytest.raises(RuntimeError, match="converted"):
            twin.half()
        assert descriptors_below(tmp_path) != []
        del twin
        assert descriptors_below(tmp_path) == []
    finally:
        gc.enable()


def test_a_wrapped_model_is_found(tmp_path):
    """As peft wraps it: its attributes are those of the model inside."""
    model, path, x = made("linear", tmp_path)
    expected = results(model, x)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    outer = nn.Sequential(model)
    assert nvmeio.torch.disk_stats(outer) == nvmeio.torch.disk_stats(model)
    other, *_ = made("linear", tmp_path)
    nvmeio.torch.disk_offload(other, path, memory="1MiB")
    with pytest.raises(ValueError, match="2 modules of this model were passed to disk_off"):
        nvmeio.torch.remove_disk_offload(nn.Sequential(outer, other))
    assert nvmeio.torch.remove_disk_offload(outer) is outer
    assert_equal(results(outer, x), expected)
    with pytest.raises(ValueError, match="are not on a drive"):
        nvmeio.torch.disk_stats(model)


PASSES = """
    import re
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import nvmeio.torch

    torch.set_num_threads(1)
    how, path = sys.argv[1:]
    x = torch.ones(64, 1024)
    with torch.device("meta" if how == "on a drive" else "cpu"):
        one = nn.Linear(1024, 1024)
        model = nn.Sequential(
            *(nn.Linear(1024, 1024) if how == "on a drive" else one for _ in range(40))
        )
    if how == "on a drive":
        nvmeio.torch.disk_offload(model, path, memory="32MiB")
    for _ in range(3):
        # And the gradient of the input.
        model(x.requires_grad_()).sum().backward()
    print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def test_the_limit_is_kept_in_a_control_group(tmp_path, control_group):
    """Which allows 64 MiB more than the same pass with one weight for all layers."""
    path = tmp_path / "model.safetensors"
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(40)))
    st.save_file(model.state_dict(), path)
    program = [sys.executable, "-c", textwrap.dedent(PASSES)]
    options = {"stdout": subprocess.PIPE, "text": True, "timeout": 100, "check": True}
    shared = subprocess.run([*program, "shared", path], **options)
    limit = (int(shared.stdout) << 10) + (32 + 64 << 20)
    limits = {"memory.limit_in_bytes": limit}, {"memory.max": limit}
    prefix = control_group("memory", *limits)
    subprocess.run([*prefix, *program, "on a drive", path], **options)


def test_the_limit_may_be_above_that_of_the_pool(tmp_path):
    path = tmp_path / "model.safetensors"
    st.save_file(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).state_dict(), path)
    code = """
        import sys
        import nvmeio.torch
        import torch
        from torch import nn

        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        nvmeio.torch.disk_offload(model, sys.argv[1], memory="64MiB")
        for _ in range(2):
            model(torch.ones(1, 512))
        stats = nvmeio.torch.disk_stats(model)
        assert stats["bytes_used"] == stats["bytes_total"] == stats["bytes_read"]
        assert nvmeio.pool_stats()["bytes_mapped"] <= 4 << 20
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), path],
        env={**os.environ, "NVMEIO_POOL_BYTES": "4MiB"},
        timeout=100,
        check=True,
    )


def test_a_forked_child_refuses(tmp_path):
    model, path, x = made("linear", tmp_path)
    nvmeio.torch.disk_offload(model, path, memory="1MiB")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model(x)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert b"0.bias is on a drive, and a forked child cannot read it" in pipe.read()


def test_functional_call_uses_the_weights(tmp_path):
    model, path, x = made("linear", tmp_path)
    expected = model(x)
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    found = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    assert torch.equal(found, expected)


class Plus(nn.Module):
    """Adds what is trained to a weight."""

    def __init__(self):
        super().__init__()
        self.delta = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, weight):
        return weight + self.delta


def test_a_parametrization_begins_with_a_weight_on_the_drive(tmp_path):
    model, path, x = made("linear", tmp_path)

    def trained(model):
        nn.utils.parametrize.register_parametrization(model[2], "weight", Plus())
        found = results(model, x)
        return *found, model[2].parametrizations.weight[0].delta.grad

    expected = trained(copy.deepcopy(model))
    nvmeio.torch.disk_offload(model, path, memory=least(model, path))
    assert_equal(trained(model), expected)


def arrange(numbers, tensor, lazy, steps):
    """Do the same random operations to a tensor and to one without values."""
    for _ in range(steps):
        ndim, count = tensor.ndim, tensor.numel()
        dim, other = (int(numbers.integers(ndim)) for _ in range(2))
        size = tensor.shape[dim]
        index = int(numbers.integers(size)) if size else 0
        order = numbers.permutation(ndim).tolist()
        operations = [
            lambda x, dim=dim: torch.stack([x, x], dim),
            lambda x, dim=dim: torch.cat([x, x, x], dim),
            lambda x, dim=dim: x.chunk(2, dim)[-1],
            lambda x, dim=dim, other=other: x.transpose(dim, other),
            lambda x, order=order: x.permute(order),
            lambda x: x.flatten().unsqueeze(0),
            lambda x: x.reshape(-1, 2) if x.numel() % 2 == 0 else x.contiguous(),
            lambda x, dim=dim, index=index: x.narrow(dim, index, x.shape[dim] - index),
        ]
        if ndim > 1 and size:
            operations += [
                lambda x, dim=dim, index=index: x.select(dim, index),
                lambda x, dim=dim, size=size: torch.split(x, [1, size - 1], dim)[0],
                lambda x, dim=dim: x.unbind(dim)[-1],
                lambda x: x[:, ::2],
            ]
        if count < 4000:
            operation = operations[numbers.integers(len(operations))]
            tensor, lazy = operation(tensor), operation(lazy)
            assert tensor.shape == lazy.shape
    return tensor, lazy


@pytest.mark.parametrize("seed", range(4))
def test_what_a_loader_arranges_is_found_in_the_files(seed):
    """As runs of elements, and as what is made of whole tensors."""
    numbers = np.random.default_rng(seed)
    for _ in range(200):
        shape = numbers.integers(1, 5, numbers.integers(1, 4)).tolist()
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        lazy = LazyTensor.of("a", shape, whole.dtype)
        expected, lazy = arrange(numbers, whole, lazy, 5)
        found = arranged(lazy)
        assert torch.equal(found.make({"a": whole}), expected)
        if found.runs is not None:
            runs = [whole.flatten()[begin:][:length] for _, begin, length in found.runs]
            assert torch.equal(torch.cat([whole[:0].flatten(), *runs]), expected.flatten())


def test_long_runs_are_read_where_they_are_needed():
    """And many short ones not at all: the tensors are read whole."""
    gate, up = (LazyTensor.of(name, (8, 64, 32), torch.float32) for name in ("gate", "up"))
    found = arranged(torch.cat([gate, up], dim=1))
    assert found.runs[:3] == [("gate", 0, 2048), ("up", 0, 2048), ("gate", 2048, 2048)]
    assert arranged(up[3:5]).runs == [("up", 3 * 2048, 2 * 2048)]
    assert arranged(gate.transpose(1, 2)).runs is None
    # Without numbers for each row.
    table = LazyTensor.of("table", (1 << 40, 8), torch.float32)
    assert arranged(table[5 : 1 << 39]).runs == [("table", 40, ((1 << 39) - 5) * 8)]


def test_a_loader_that_computes_is_refused():
    tensor = LazyTensor.of("a", (4,), torch.float32)
    for compute in (lambda x: x * 2, lambda x: x.cumsum(0), lambda x: x[torch.tensor([0])]):
        with pytest.raises(NotImplementedError, match="a is loaded through aten"):
            compute(tensor)
    twice = tensor.to(torch.float16).to(torch.float64)
    with pytest.raises(NotImplementedError, match="several dtypes"):
        arranged(twice)


class TestOrder:
    def expected(self, uses, before=range(5)):
        order = Order(before)
        for number in uses:
            order.use(number)
        return order, list(order.expected())

    def test_a_pass_is_expected_again(self):
        assert self.expected([])[1] == [0, 1, 2, 3, 4]
        assert self.expected([0, 1])[1][:4] == [2, 3, 4, 0]
        assert self.expected([0, 1, 2, 3, 4] * 2 + [0])[1] == [1, 2, 3, 4, 0]

    def test_a_backward_pass_is_expected_in_reverse(self):
        step = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
        order, found = self.expected(step * 3 + [0, 1, 2])
        assert found[:6] == [3, 4, 3, 2, 1, 0]
        assert [order.distance(each) for each in (3, 4, 2, 0)] == [0, 1, 3, 5]
        assert next(order.farthest()) == 0

    def test_the_next_use_is_the_first_one_that_is_expected(self):
        order, found = self.expected([0, 1, 0, 2, 0, 3] * 3)
        assert found[:3] == [0, 1, 0]
        assert list(order.farthest()) == [3, 2, 1, 0]
        assert order.distance(4) is None

    def test_old_uses_are_forgotten(self):
        order, found = self.expected(list(range(5)) * 5000)
        assert found == [0, 1, 2, 3, 4]
        assert len(order._uses) <= 4200
