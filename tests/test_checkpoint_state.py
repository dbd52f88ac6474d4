"""States are restored exactly, or refused by an error with the path in the state."""

import collections
import contextlib
import copy
import datetime as dt
import json
import math
import struct
import subprocess
import sys
import textwrap

import crc32c
import numpy as np
import pytest

from nvmeio.checkpoint import Checkpointer, CheckpointError

pytest.importorskip("torch")

import safetensors.torch
import torch

import nvmeio.safetensors.torch
import nvmeio.torch
from model_samples import TORCH_DTYPES, filled
from nvmeio._memory.deferred import Deferred, DeferredState
from nvmeio._tensors import memory
from nvmeio._tensors.sharing import start_of
from nvmeio.checkpoint._restoring import Held
from nvmeio.checkpoint._tree import DEPTH_MAX
from trainings import FORMS, KINDS, new_training, steps


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path / "root", verify="checksum") as found:
        yield found


def through(checkpointer, state, way="save"):
    """Save a state and restore it."""
    if way == "save":
        checkpointer.save(1, state)
    else:
        checkpointer.save_async(1, state, stage=way == "staged").result()
    checkpointer.verify(1)
    return checkpointer.restore(1)


def same(one, other):
    """Return whether two states are equal, in type and to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape, one.requires_grad) != (
            other.dtype,
            other.shape,
            other.requires_grad,
        ):
            return False
        bits = [each.detach().contiguous().reshape(-1) for each in (one, other)]
        bits = [each.resolve_conj().resolve_neg().view(torch.uint8) for each in bits]
        return torch.equal(*bits) if one.numel() else True
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (float, np.floating)):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    return one == other


PLAIN = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2**63,
        -(2**9000),
        "",
        "text ä \0 \ud800 \n",
        b"",
        b"\0\xff",
    ),
    *(0.0, -0.0, 0.1, 1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(1j, complex(math.nan, -0.0), torch.Size([]), torch.Size([2, 3])),
    *([], (), {}, [[]], ((),), {"": {}}, collections.OrderedDict()),
    *({1: "a", 0: "b"}, {"1": 1, 1: 2}, {"a/b": 1, "a~b": 2, "__metadata__": 3}),
    collections.OrderedDict([("b", 1), (3, (1, [2, {"c": None}]))]),
    *(np.float64(0.1), np.float32("nan"), np.int8(-3), np.bool_(True), np.str_("")),
    *(collections.Counter({80: 1, 3: 2}), torch.float32, torch.device("cuda", 1)),
    *(np.complex64(1 + 2j), np.datetime64("2020-01-01"), np.str_("ä"), np.bytes_(b"x")),
]


@pytest.mark.parametrize("state", PLAIN, ids=lambda state: ascii(state)[:40])
def test_plain_values_are_restored(checkpointer, state):
    found = through(checkpointer, state)
    assert same(found, state)
    nested = {"a": [state, (state,)]}
    assert same(through(checkpointer, nested), nested)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [*TORCH_DTYPES, "complex128", "complex32"])
def test_tensors_of_every_dtype(checkpointer, dtype, shape):
    real = {"complex128": "float64", "complex32": "float16"}.get(dtype)
    tensor = filled(dtype, shape) if real is None else filled(real, (*shape, 2))
    if real is not None:
        tensor = torch.view_as_complex(tensor)
    found = through(checkpointer, {"x": tensor})["x"]
    assert same(found, tensor)


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(10)[::-2],
    np.broadcast_to(np.arange(3), (4, 3)),
    np.array(5, np.uint16),
    np.empty((0, 3), np.float16),
    np.arange(3, dtype=">i4"),
    np.array([1 + 2j, complex("nan")]),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2020-01-01", "NaT"], "M8[us]"),
    np.array([True, False]),
    np.zeros(3, [("a", "<i4"), ("b", ">f8", (2, 2)), ("c", [("d", "S3"), ("e", "u1")])]),
    np.array([b"12345678"], "V8"),
    np.arange(2, dtype=np.longdouble),
    np.empty(2, "U0"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
@pytest.mark.parametrize("way", ["save", "staged"])
def test_arrays_are_restored(checkpointer, array, way):
    found = through(checkpointer, {"x": array}, way)["x"]
    assert same(found, array)
    assert found.flags.writeable


def empty_like(value):
    """Return other memory of a shape and dtype, in C order."""
    if isinstance(value, np.ndarray):
        return np.empty(value.shape, value.dtype)
    return torch.empty(value.shape, dtype=value.dtype)


TABLE = torch.arange(6000.0).view(20, 30, 10)
PAIRS = torch.view_as_complex(TABLE.double().reshape(10, 20, 15, 2))
TIED = {
    name: (view, view.detach() if isinstance(view, torch.Tensor) else view[:])
    for name, view in {
        "column": TABLE[:, 5, 3],
        "turned": TABLE.permute(2, 0, 1)[3:5, :, ::2],
        "bfloat16": TABLE.bfloat16()[:, :, 4:6].transpose(0, 1),
        "pairs": PAIRS[:, :, 4:6].permute(1, 2, 0),
        "conjugate": PAIRS[:, :, 4:6].mT.conj(),
        "negative": PAIRS[..., 2].conj().imag,
        "array": TABLE.numpy()[:, 5, 3],
        "array backwards": TABLE.numpy().T[3:5, ::-1, ::-2],
        "array of dates": np.arange(12).astype("M8[s]").reshape(3, 4).T[1:3],
    }.items()
}
TIED["array and tensor"] = (TABLE.numpy()[:, 5:7].T, TABLE[:, 5:7].permute(2, 1, 0))


@pytest.mark.parametrize("way", ["save", "staged", "unstaged"])
class TestShared:
    """Tensors that share memory share it after restore, and save only their own bytes."""

    def test_tied_tensors_stay_tied(self, checkpointer, way):
        weight = torch.randn(50, 20)
        state = {"a": weight, "b": weight, "c": weight.detach(), "d": torch.randn(3)}
        found = through(checkpointer, state, way)
        assert same(found, state)
        found["a"][3, 4] = 7
        assert found["b"][3, 4] == found["c"][3, 4] == 7
        stored = self.stored(checkpointer)
        assert sorted(stored) == ["a", "d"]

    def stored(self, checkpointer):
        path = checkpointer.root / "step-1" / "tensors.safetensors"
        return safetensors.torch.load_file(path)

    def test_views_of_a_saved_tensor_share_its_memory(self, checkpointer, way):
        base = torch.randn(40, 30)
        state = {"rows": base[5:9], "base": base, "turned": base.t(), "one": base[3, 7]}
        found = through(checkpointer, state, way)
        assert same(found, state)
        assert found["turned"].stride() == (1, 30)
        found["base"].zero_()
        assert not any(found[name].any() for name in state)
        assert list(self.stored(checkpointer)) == ["base"]

    def test_overlapping_views_share_memory_without_their_base(self, checkpointer, way):
        base = torch.randn(1_000_000)
        state = {"a": base[100:200], "b": base[150:250], "c": base[500:510]}
        found = through(checkpointer, state, way)
        assert same(found, state)
        found["a"][60] = 7
        assert found["b"][10] == 7
        sizes = {name: each.nbytes for name, each in self.stored(checkpointer).items()}
        assert sizes == {"a~memory": 600, "c": 40}

    @pytest.mark.parametrize("kind", ["torch", "numpy"])
    def test_columns_save_only_their_own_bytes(self, checkpointer, way, kind):
        base = torch.randn(100, 1000)
        base = base if kind == "torch" else base.numpy()
        state = {"a": base[:, :10], "b": base[:, 10:20], "c": base[::7, 500]}
        found = through(checkpointer, state, way)
        dense = {n: np.ascontiguousarray(np.asarray(each)) for n, each in state.items()}
        assert all(np.array_equal(np.asarray(found[n]), dense[n]) for n in dense)
        total = sum(each.nbytes for each in self.stored(checkpointer).values())
        assert total == sum(each.nbytes for each in dense.values())

    @pytest.mark.parametrize("name", TIED)
    def test_a_strided_view_that_is_there_twice_saves_only_its_elements(
        self, checkpointer, way, name
    ):
        view, other = TIED[name]
        state = {"a": view, "list": [view, other]}
        found = through(checkpointer, state, way)
        assert same(found, state)
        (stored,) = self.stored(checkpointer).values()
        assert stored.nbytes == view.nbytes
        (alone,) = checkpointer.restore(1, names=["a"]).values()
        assert same(alone, view)
        parts = [found["a"], *found["list"]]
        assert {start_of(each) for each in parts} == {start_of(found["a"])}
        for each, source in zip([alone, *parts], [view, view, *state["list"]], strict=True):
            strides = each.strides if isinstance(each, np.ndarray) else each.stride()
            assert strides == dense_strides(source)
        into = {"a": empty_like(view), "list": [empty_like(view), empty_like(other)]}
        assert same(checkpointer.restore(1, into=into), state)

    def test_views_of_other_dtypes(self, checkpointer, way):
        base = torch.arange(101, dtype=torch.uint8)
        state = {"bytes": base, "halves": base[2:10].view(torch.float16)}
        state["one"] = base[:1]
        found = through(checkpointer, state, way)
        assert same(found, state)
        found["bytes"].zero_()
        assert not found["halves"].any()

    def test_arrays_and_tensors_share_memory(self, checkpointer, way):
        array = np.arange(100.0)
        state = {"array": array[10:], "tensor": torch.from_numpy(array)[:50]}
        state["back"] = array[::-1][:30]
        found = through(checkpointer, state, way)
        assert same(found, state)
        found["tensor"][10:] = 7
        assert (found["array"][:40] == 7).all()

    def test_a_flat_parameter_and_its_views_share_memory(self, checkpointer, way):
        flat = torch.nn.Parameter(torch.randn(3000))
        state = {"flat": flat, "views": [flat.detach()[at : at + 3] for at in range(1000)]}
        found = through(checkpointer, state, way)
        assert same(found, state)
        assert list(self.stored(checkpointer)) == ["flat"]

    def test_lazy_views(self, checkpointer, way):
        base = torch.randn(5, dtype=torch.complex64)
        state = {"base": base, "conj": base.conj(), "negative": base.conj().imag}
        found = through(checkpointer, state, way)
        assert all(torch.equal(found[name], state[name]) for name in state)
        for alone in (base.conj(), base[0].conj(), base[0].conj().imag):
            assert torch.equal(through(checkpointer, {"a": alone}, way)["a"], alone)

    def test_views_of_larger_elements(self, checkpointer, way):
        """torch needs offsets that are multiples of the element size."""
        numbers = torch.arange(20.0)
        pairs = torch.view_as_complex(numbers.view(10, 2))
        some = torch.arange(20, dtype=torch.uint8)
        states = [{"a": numbers[1:10], "z": pairs[1:6]}]
        states.append({"bytes": some[2:20], "floats": some.view(torch.float32)[1:5]})
        for state in states:
            assert same(through(checkpointer, state, way), state)

    def test_arrays_of_dtypes_beyond_numpys_are_restored(self, checkpointer, way):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            tensor = torch.arange(8).to(dtype)
            state = {"tensor": tensor, "array": tensor.view(torch.int8).numpy()}
            found = through(checkpointer, state, way)
            assert same(found, state)
            found["array"][:] = 0
            assert not found["tensor"].float().any()

    def test_an_expanded_tensor_is_saved_once(self, checkpointer, way):
        state = {"a": torch.ones(3).expand(100_000, 3), "b": torch.tensor(7.0).expand(9)}
        state["c"] = np.broadcast_to(np.arange(4), (5000, 4))
        found = through(checkpointer, state, way)
        assert all(np.array_equal(found[name], state[name]) for name in state)
        stored = self.stored(checkpointer)
        assert sum(each.nbytes for each in stored.values()) == 3 * 4 + 4 + 4 * 8


def test_an_array_at_an_odd_distance_from_a_tensor_is_refused(checkpointer):
    memory = np.zeros(64, np.uint8)
    tensor = torch.from_numpy(memory[1:41]).view(torch.float32)
    other = torch.from_numpy(memory[3:43]).view(torch.float32)
    with pytest.raises(
        TypeError, match=r"state\['b'\] cannot be saved: .* no multiple of its element size"
    ):
        checkpointer.save(1, {"a": tensor, "b": other})


def test_a_scheduler_with_a_counter_resumes(checkpointer):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])
    scheduler.load_state_dict(through(checkpointer, scheduler.state_dict()))
    assert type(scheduler.milestones) is collections.Counter
    assert scheduler.milestones[4] == 2


def test_buffers_come_back_as_buffers(checkpointer):
    values = torch.randn(3)
    state = {
        "kept": torch.nn.Buffer(values),
        "transient": torch.nn.Buffer(values[:2], persistent=False),
        "tensor": torch.randn(3),
    }
    found = through(checkpointer, state)
    assert same(found, state)
    module = torch.nn.Module()
    for name, tensor in found.items():
        setattr(module, name, tensor)
    assert [name for name, _ in module.named_buffers()] == ["kept", "transient"]
    assert list(module.state_dict()) == ["kept"]
    found["kept"].zero_()
    assert not found["transient"].any()


def test_parameters_and_requires_grad_are_restored(checkpointer):
    state = {
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "leaf": torch.randn(3, requires_grad=True),
        "made": torch.randn(3, requires_grad=True) * 2,
    }
    found = through(checkpointer, state)
    assert same(found, state)
    assert found["made"].is_leaf


def test_restore_computes_checksums_of_the_bytes_it_reads(checkpointer, monkeypatch):
    whole = torch.arange(1000.0)
    state = {"whole": whole, "half": whole[500:], "turned": torch.ones(30, 40).T}
    state |= {"tied": [whole], "none": np.zeros((2, 0)), "pairs": torch.ones(5) * 1j}
    checkpointer.save(1, state)
    read, verify_file = [], Held._verify_file

    def verify_and_note(held, name, *progress):
        read.append(name)
        return verify_file(held, name, *progress)

    monkeypatch.setattr(Held, "_verify_file", verify_and_note)
    for options in ({}, {"into": state}):
        assert same(checkpointer.restore(1, **options), state)
        assert read == []
    # Two tensors restored into the same memory would look like damage of the file.
    both = torch.zeros(1000)
    into = state | {"whole": both, "half": both[:500], "tied": [both], "turned": both}
    with pytest.raises(ValueError, match="turned"):
        checkpointer.restore(1, into=into)
    into["turned"] = both[: 30 * 40 // 2].repeat(2).view(40, 30)
    with pytest.raises(ValueError, match="share memory"):
        checkpointer.restore(1, into=into)


def test_names_in_the_file_are_paths(checkpointer):
    state = {"model": {"a.weight": 1, "b/c": 2, "d~e": 3}, 0: 4, "0": 5}
    state = {k: {n: torch.tensor(v) for n, v in s.items()} if isinstance(s, dict) else
             torch.tensor(s) for k, s in state.items()}  # fmt: skip
    state["__metadata__"] = [torch.tensor(6), torch.tensor(7)]
    assert same(through(checkpointer, state), state)
    path = checkpointer.root / "step-1" / "tensors.safetensors"
    found = {name: each.item() for name, each in safetensors.torch.load_file(path).items()}
    expected = {"model/a.weight": 1, "model/b~1c": 2, "model/d~0e": 3, "0": 4, "0~2": 5}
    assert found == expected | {"__metadata__/0": 6, "__metadata__/1": 7}


IMAGES = torch.arange(4 * 3 * 5 * 2.0).reshape(4, 3, 5, 2)
LAYOUTS = {
    "channels_last": IMAGES.to(memory_format=torch.channels_last),
    "channels_last of one": IMAGES[:, :1].to(memory_format=torch.channels_last),
    "channels_last_3d of one": IMAGES[:, None].to(memory_format=torch.channels_last_3d),
    "transposed": IMAGES[0, 0].t(),
    "row, transposed": torch.arange(6.0)[None].t(),
    "row of any stride": torch.arange(6.0).as_strided((1, 6), (2**40, 1)),
    "row of stride 0": torch.arange(6.0).as_strided((1, 6), (0, 1)),
    "permuted pairs": torch.view_as_complex(IMAGES).permute(2, 0, 1),
    "parts of rows": IMAGES.permute(1, 0, 3, 2)[1:, :2, 1:, ::2],
    "contiguous": IMAGES[1],
    "column": IMAGES[0, 0, :, :1],
    "bfloat16": IMAGES[0].to(torch.bfloat16).permute(1, 2, 0),
    "parameter": torch.nn.Parameter(IMAGES.to(memory_format=torch.channels_last)),
    "array in F order": np.asfortranarray(IMAGES.numpy()),
    "array in blocks of columns": np.arange(450).reshape(150, 3).T,
    "array of dates": np.arange(12).astype("M8[s]").reshape(3, 4).T,
    "array backwards": np.arange(12.0).reshape(3, 4).T[::-1, ::-1],
}


def dense_strides(value):
    """Return the strides of a dense copy in the same order, which numpy and torch make."""
    if isinstance(value, np.ndarray):
        return np.copy(value, order="K").strides
    return torch.clone(value).stride()


@pytest.mark.parametrize("slices", ["one slice", "slices of 24 bytes"])
@pytest.mark.parametrize("way", ["save", "staged", "unstaged"])
@pytest.mark.parametrize("value", LAYOUTS.values(), ids=LAYOUTS)
def test_elements_keep_their_order_in_memory(monkeypatch, checkpointer, value, way, slices):
    if slices != "one slice":
        monkeypatch.setattr(memory, "SLICE_BYTES", 24)
    found = through(checkpointer, {"x": value}, way)["x"]
    assert same(found, value)
    strides = found.strides if isinstance(found, np.ndarray) else found.stride()
    assert strides == dense_strides(value)
    zeros = np.zeros_like if isinstance(value, np.ndarray) else torch.zeros_like
    target = zeros(value)
    checkpointer.restore(1, into={"x": target})
    assert bool((target == value).all())


def test_a_view_with_more_bytes_between_rows_than_64_bits_hold(checkpointer):
    """Of one row, whose stride may be any."""
    base = torch.arange(6.0)
    state = {"base": base, "view": base.as_strided((1, 6), (2**62, 1))}
    assert same(through(checkpointer, state), state)


TURNED = """
    import re
    import sys
    from pathlib import Path

    import numpy as np
    import torch

    from nvmeio.checkpoint import Checkpointer

    PROCESS = Path("/proc/self")

    def peak(function):
        (PROCESS / "clear_refs").write_text("5")  # the peak is what is used now
        used = [number("VmRSS")]
        found = function()
        used.append(number("VmHWM"))
        print(used[1] - used[0])
        return found

    def number(name):
        return int(re.search(name + r":\\s+(\\d+)", (PROCESS / "status").read_text())[1])

    x = torch.ones(2, 2, dtype=torch.complex128).t()
    small = {"x": x, "y": np.asfortranarray(np.ones((2, 2), ">f4"))}
    x = torch.ones(2000, 2000, dtype=torch.complex128).t()
    large = {"x": x, "y": np.asfortranarray(np.ones((4000, 4000), ">f4"))}
    with Checkpointer(sys.argv[1], verify="checksum") as checkpointer:
        for step, state in enumerate((small, large), 1):
            save = lambda: checkpointer.save_async(step, state, stage=False).result()
            peak(save)
            found = peak(lambda: checkpointer.restore(step))
            peak(lambda: checkpointer.restore(step, into=found))
"""


def test_elements_in_another_order_are_not_copied_all_at_once(tmp_path):
    """The state has 128 MB; a save has buffers of 32 MiB, which slices add 8 MiB to."""
    program = [sys.executable, "-c", textwrap.dedent(TURNED), tmp_path / "root"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=True)
    saved, restored, filled = (int(line) for line in done.stdout.split()[3:])
    assert max(saved, restored - 125_000, filled) < 80_000


def test_other_programs_find_the_shape_of_the_value(checkpointer):
    checkpointer.save(1, {name: copy.deepcopy(value) for name, value in LAYOUTS.items()})
    path = checkpointer.root / "step-1" / "tensors.safetensors"
    stored = safetensors.torch.load_file(path)
    for name in ("channels_last", "transposed", "parts of rows", "bfloat16"):
        assert torch.equal(stored[name], LAYOUTS[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("way", ["new", "into", "staged", "unstaged"])
def test_an_optimizer_resumes_to_the_bit(checkpointer, layout, kind, form, way):
    model, optimizer = new_training(layout, kind, form)
    steps(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["rng"] = torch.get_rng_state()
    if way in ("staged", "unstaged"):
        checkpointer.save_async(3, state, stage=way == "staged").result()
    else:
        checkpointer.save(3, state)
    again, other = new_training(layout, kind, form)
    # deepcopy keeps strides.
    into = copy.deepcopy(state) if way == "into" else None
    steps(model, optimizer, 2)
    found = checkpointer.restore(into=into)
    again.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    assert torch.equal(found["rng"], state["rng"])
    steps(again, other, 2)
    assert same(again.state_dict(), model.state_dict())


def test_restored_tensors_begin_where_torch_allocates_them(checkpointer):
    """Some are of no multiple of 64 bytes, so that those after them are not either."""
    state = {name: filled(name, (7, 3)) for name in TORCH_DTYPES}
    state |= {str(size): torch.arange(size) for size in (1, 8, 511, 512, 513, 9000)}
    checkpointer.save(1, state)
    for names in (None, ["513"], ["1", "511", "8"], TORCH_DTYPES[::3]):
        found = checkpointer.restore(names=names)
        assert same(found, {name: state[name] for name in found})
        assert not any(start_of(value) % 64 for value in found.values())


def test_an_optimizer_that_sums_its_states_resumes_to_the_bit(checkpointer):
    """At other addresses MKL sums in another order.  The states have 4 N bytes, N odd."""

    def new():
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 7)
        )
        return model, torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=5)

    def train(model, optimizer):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))

        def loss():
            optimizer.zero_grad()
            found = model(inputs).square().mean()
            found.backward()
            return found

        for _ in range(5):
            optimizer.step(loss)

    model, optimizer = new()
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpointer.save(1, state)
    train(model, optimizer)
    again, other = new()
    found = checkpointer.restore()
    again.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    train(again, other)
    assert same(again.state_dict(), model.state_dict())


# A budget that cuts the weights of OFFLOADED into pieces, and one that does not.
BUDGETS = {"in one piece": "64MiB", "split": "8MiB"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("before", [*BUDGETS, "in memory"])
@pytest.mark.parametrize("after", [*BUDGETS, "in memory"])
def test_an_offloaded_optimizer_resumes_to_the_bit(
    checkpointer, tmp_path, layout, form, before, after
):
    """Offloaded or not, before and after, each beside one that was not interrupted."""

    def new(how, name):
        model, optimizer = new_training(layout, "AdamW", form, wide=256)
        if how == "in memory":
            return model, optimizer
        memory = BUDGETS[how]
        made = nvmeio.torch.offload(optimizer, tmp_path / name, memory=memory)
        (pieces, *_) = made._pieces.values()
        assert (len(pieces) > 1) == (how == "split")
        return model, made

    def items_of(optimizer):
        deferred = getattr(optimizer, "state_items", optimizer.state_dict)
        return deferred()

    with contextlib.ExitStack() as stack:
        model, optimizer = new_training(layout, "AdamW", form, wide=256)
        steps(model, optimizer, 4, wide=256)
        first, saved = new(before, "before")
        if before != "in memory":
            stack.enter_context(saved)
        steps(first, saved, 2, wide=256)
        state = {"model": first.state_dict(), "optimizer": items_of(saved)}
        checkpointer.save(2, state)
        second, other = new(after, "after")
        if after != "in memory":
            stack.enter_context(other)
        found = checkpointer.restore()
        second.load_state_dict(found["model"])
        other.load_state_dict(found["optimizer"])
        steps(second, other, 2, first=2, wide=256)
        assert same(second.state_dict(), model.state_dict())


class Versioned(torch.nn.Module):
    """A module whose state was renamed in version 2."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.seen = []

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.seen.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("way", ["save", "staged", "names", "into"])
def test_modules_find_the_version_that_saved_them(checkpointer, way):
    model = torch.nn.Sequential(Versioned())
    state = {"model": model.state_dict(), "step": 1}
    if way in ("names", "into"):
        checkpointer.save(1, state)
        chosen = {"names": ["model"]} if way == "names" else {"into": copy.deepcopy(state)}
        found = checkpointer.restore(1, **chosen)
    else:
        found = through(checkpointer, state, way)
    assert type(found["model"]) is collections.OrderedDict
    model.load_state_dict(found["model"])
    assert model[0].seen == [2]


def test_metadata_of_a_module_that_has_tensors_is_refused(checkpointer):
    state = torch.nn.Linear(2, 2).state_dict()
    state._metadata[""]["scale"] = torch.ones(2)
    with pytest.raises(
        TypeError, match=r"state\['_metadata'\], an attribute, has a tensor"
    ):
        checkpointer.save(1, state)


def test_checkpoints_of_the_first_format_are_restored(checkpointer):
    state = {"x": torch.arange(6.0).reshape(2, 3).t(), "y": np.arange(3)}
    checkpointer.save(1, state)

    def change(said):
        del said["state"]["dict"]["x"]["strides"]
        said["format"] = "nvmeio-checkpoint-1"

    change_tree(checkpointer, change)
    path = checkpointer.root / "step-1" / "manifest.json"
    path.write_text(path.read_text().replace("checkpoint-2", "checkpoint-1"))
    assert same(checkpointer.restore(1), state)


class Other(dict):
    """A subclass of dict, which a state refuses."""


def cycle():
    found = [1]
    found.append({"a": found})
    return found


def deep():
    found = []
    for _ in range(DEPTH_MAX + 1):
        found = [found]
    return found


def lazy():
    return torch.nn.LazyLinear(3).weight


def with_attribute():
    found = collections.OrderedDict(a=1)
    found.note = "precious"
    return found


def freed(count=100_000, nbytes=0):
    """Return a tensor whose storage was freed, as FSDP leaves it."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


REFUSED = {
    "object": (object(), r"state\['a'\]\[1\] is of type builtins.object; a state may have"),
    "set": ({1}, "type builtins.set"),
    "subclass": (Other(), "Other"),
    "named tuple": (collections.namedtuple("P", "x")(1), "P"),
    "date": (dt.date(2020, 1, 1), "datetime.date"),
    "surrogates": ("ab\ud83d\ude00", "a pair of surrogates"),
    "long key": ({1 << 20_000: 1}, "an int of 20001 bits"),
    "key": ({(1, 2): 3}, r"state\['a'\]\[1\] has a key of type tuple, \(1, 2\)"),
    "true key": ({True: 3}, "has a key of type bool"),
    "surrogate key": ({"\ud800": torch.ones(1)}, "not valid Unicode"),
    "cycle": (cycle(), r"state\['a'\]\[1\]\[1\]\['a'\] contains itself"),
    "deep": (deep(), "nested deeper than 100"),
    "alike": (
        {n * (2**61 - 1): n for n in range(1, 102)},
        "has 101 keys with the same hash",
    ),
    "number": (1 << 20_000, "an int of 20001 bits"),
    "sparse": (
        torch.eye(3).to_sparse(),
        r"cannot be saved: its layout is torch.sparse_coo",
    ),
    "meta": (torch.ones(3, device="meta"), "no data"),
    "quantized": (torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8), "quantized"),
    "lazy": (lazy(), "it is not initialized yet"),
    "zero": (torch._efficientzerotensor(3), "ZeroTensor of forward AD"),
    "nested": (torch.nested.nested_tensor([torch.ones(2)]), "nested"),
    "objects": (np.array([None]), "Python objects"),
    "fields of objects": (np.zeros(1, [("a", "O")]), "Python objects"),
    "no fields": (np.zeros(3, []), "cannot be stored"),
    "fields in no order": (
        np.zeros(3, {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]}),
        "cannot be stored",
    ),
    "freed": (freed(), "its storage was freed: it has 0 bytes"),
    "masked": (np.ma.ones(3), "its mask would be lost; pass its data and its mask"),
    "matrix": (np.matrix([1]), "matrix"),
    "attribute": (with_attribute(), "the attribute 'note', which would be lost"),
    "name that JSON changes": (
        np.zeros(3, [("\ud83d\ude00", "i4")]),
        "cannot be stored",
    ),
    "subclass of a scalar": (type("Metres", (np.float64,), {})(1), "Metres"),
    "object scalar": (np.array([object()], object)[0], "builtins.object"),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_unsupported_values_are_refused_before_anything_is_written(checkpointer, value):
    value, words = value
    state = {"ok": torch.ones(3), "a": [1, value]}
    for save in (checkpointer.save, checkpointer.save_async):
        with pytest.raises((TypeError, ValueError), match=words) as refused:
            save(1, state)
        assert "state['a'][1]" in str(refused.value)
    assert not checkpointer.root.exists()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "int4"])
def test_scalars_and_fields_of_other_dtypes_are_refused(checkpointer, name):
    """Their text, such as "<V2" or "<f1", is that of another dtype, or of none."""
    kind = getattr(pytest.importorskip("ml_dtypes"), name)
    for value in (kind(1), np.ones(2, [("a", kind)]), np.ones(2, [("a", kind, (2,))])):
        with pytest.raises(TypeError, match=r"state\['a'\]"):
            checkpointer.save(1, {"a": value})
    assert not checkpointer.root.exists()


def test_the_error_for_dtensors_names_another_function(checkpointer):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(4), mesh)
        with pytest.raises(
            TypeError, match=r"state\['x'\] .*torch\.distributed\.checkpoint"
        ):
            checkpointer.save(1, {"x": tensor})
    finally:
        dist.destroy_process_group()


def test_metadata(checkpointer):
    said = {"epoch": 3, "loss": math.nan, "tags": ("a", None)}
    checkpointer.save(1, {}, said)
    checkpointer.save(2, {})
    assert same(checkpointer.metadata(1), said)
    assert checkpointer.metadata() is None
    for value, error, words in (
        ({1}, TypeError, "is of type"),
        (1 << 20_000, ValueError, "has"),
    ):
        with pytest.raises(error, match=rf"^metadata\['x'\] {words}"):
            checkpointer.save(3, 1, {"x": value})
    with pytest.raises(TypeError, match=r"metadata\['x'\] is a tensor"):
        checkpointer.save(3, {}, {"x": torch.ones(1)})


class TestInto:
    """restore(into=) fills existing tensors."""

    @pytest.mark.parametrize("begin", [0, 2])
    def test_targets_that_overlap_are_refused(self, checkpointer, begin):
        """Each would be filled with a mixture of both."""
        checkpointer.save(1, {"a": torch.ones(4), "b": torch.zeros(4), "c": np.arange(4)})
        memory, array = torch.full((8,), 7.0), np.full(4, 7)
        into = {"a": memory[:4], "b": memory[begin : begin + 4], "c": array}
        with pytest.raises(ValueError, match=r"state\['a'\] and state\['b'\] share memory"):
            checkpointer.restore(1, into=into)
        assert memory.eq(7).all()
        assert (array == 7).all()

    def test_targets_may_share_memory_as_in_the_checkpoint(self, checkpointer):
        memory = torch.arange(8.0)
        state = {"a": memory[:5], "b": memory[3:], "c": memory[:5]}
        checkpointer.save(1, state)
        other = torch.zeros(8)
        into = {"a": other[:5], "b": other[3:], "c": other[:5]}
        checkpointer.restore(1, into=into)
        assert torch.equal(other, memory)
        into["b"] = other[2:7]
        with pytest.raises(ValueError, match="share memory, but not in the checkpoint"):
            checkpointer.restore(1, into=into)

    def test_targets_that_share_memory_in_another_order_are_refused(self, checkpointer):
        square = torch.arange(9.0).view(3, 3)
        checkpointer.save(1, {"a": square, "b": square.t()})
        other = torch.zeros(3, 3)
        with pytest.raises(ValueError, match="or not alike"):
            checkpointer.restore(into={"a": other, "b": other})
        assert not other.any()
        checkpointer.restore(into={"a": other, "b": other.t()})
        assert torch.equal(other, square)
        # One that is saved twice may be restored in any order.
        checkpointer.save(2, {"a": square, "b": square})
        checkpointer.restore(into={"a": other.t(), "b": other.t()})
        assert torch.equal(other.t(), square)

    @pytest.mark.parametrize("stage", [False, True])
    def test_a_tensor_of_another_size_than_it_says_is_not_saved(self, checkpointer, stage):
        class State(DeferredState):
            def _tree(self):
                return {"a": Deferred(torch.float32, (4,), (1,), lambda: torch.ones(8))}

            def _require_same(self):
                """It has not changed."""

        state = {"deferred": State(), "last": np.arange(4)}
        with pytest.raises(ValueError, match="has 32 bytes, but said to be F32 of shape"):
            checkpointer.save_async(1, state, stage=stage).result()
        assert checkpointer.steps() == []

    STATE = {  # noqa: RUF012
        "model": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2)},
        "list": [np.arange(5), 3],
        "lr": 0.1,
        "lrs": 0.2,
    }

    @pytest.mark.parametrize("step", [1, 2])
    def test_every_tensor_is_filled_in_place(self, checkpointer, step):
        state = self.STATE | {"tied": self.STATE["model"]["a"]}
        checkpointer.save(1, state)
        base = torch.zeros(3, 4 * step)
        into = {
            "model": {"a": base[:, ::step], "b": torch.nn.Parameter(torch.zeros(2))},
            "list": (np.zeros(10, int)[::2], 0),
            "tied": torch.zeros(3, 4),
            "lr": 0.5,
            "more": 1,
        }
        found = checkpointer.restore(into=into)
        assert found["model"]["a"] is into["model"]["a"]
        assert found["model"]["b"] is into["model"]["b"]
        assert found["tied"] is into["tied"]
        assert found["list"][0] is into["list"][0]
        assert torch.equal(base[:, ::step], state["model"]["a"])
        assert torch.equal(into["tied"], state["model"]["a"])
        assert torch.equal(into["model"]["b"], state["model"]["b"])
        assert np.array_equal(into["list"][0], state["list"][0])
        assert (found["lr"], found["list"][1], "more" in found) == (0.1, 3, False)

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (
                {"model": {"a": torch.zeros(3, 4)}},
                ValueError,
                r"lacks state\['model'\]\['b'\]",
            ),
            (
                {"list": [np.zeros(5, int)]},
                ValueError,
                r"state\['list'\] has 1 items; .* 2",
            ),
            (
                {"list": [np.zeros(5, "i4"), 0]},
                ValueError,
                r"\['list'\]\[0\] has the dtype int32",
            ),
            ({"list": [torch.zeros(5, dtype=torch.int64), 0]}, TypeError, "has an array"),
            ({"list": {}}, TypeError, "is of type dict; the checkpoint has a list"),
            (
                {"model": {"a": torch.zeros(4, 3), "b": torch.zeros(2)}},
                ValueError,
                r"shape \[4, 3\]; the checkpoint has torch.float32 and \[3, 4\]",
            ),
            ({"list": [np.broadcast_to(np.arange(1), 5), 0]}, ValueError, "is read-only"),
            *(
                ({"model": {"a": torch.zeros(3, 4), "b": target}}, ValueError, words)
                for target, words in (
                    (torch.zeros(1).expand(2), r"\['b'\] cannot be filled: several of"),
                    (torch.zeros(2, device="meta"), "it is on the meta device"),
                    (torch._neg_view(torch.zeros(2)), "it is a conjugate or negative view"),
                    (freed(2, nbytes=4), "its storage was freed: it has 4 bytes"),
                    (torch.nested.nested_tensor([torch.zeros(2)]), "it is nested"),
                    (torch._efficientzerotensor(2), "it is a ZeroTensor"),
                )
            ),
            (
                {"model": {"a": torch.ones(6).as_strided((3, 4), (1, 1))}},
                ValueError,
                r"\['a'\] cannot be filled: several of its elements share memory",
            ),
        ],
    )
    def test_a_state_that_does_not_fit_is_refused_before_anything_changes(
        self, checkpointer, change, error, words
    ):
        checkpointer.save(1, self.STATE)
        into = {
            "model": {"a": torch.zeros(3, 4), "b": torch.zeros(2)},
            "list": [np.zeros(5, int), 0],
        }
        kept = into["model"]["a"], into["list"][0]
        with pytest.raises(error, match=words):
            checkpointer.restore(into=into | change)
        assert not any(each.any() for each in kept)

    def test_parts_of_a_state_are_restored(self, checkpointer):
        checkpointer.save(1, self.STATE | {"turned": torch.ones(2, 3).t()})
        found = checkpointer.restore(names=["model/b", "lr"])
        assert same(found, {"model": {"b": torch.ones(2)}, "lr": 0.1})
        into = {"model": {"b": torch.zeros(2)}}
        assert checkpointer.restore(names=["model/b"], into=into)["model"]["b"].all()
        # A part may be nested in another.
        for names in (["model", "model/b"], ["model/b", "model"]):
            assert same(checkpointer.restore(names=names), {"model": self.STATE["model"]})
        checkpointer.save(2, {"": torch.ones(2), "a": 1, "b": {"": 2, "c": 3}})
        assert checkpointer.restore(names=["a"]) == {"a": 1}
        assert checkpointer.restore(names=["b/"]) == {"b": {"": 2}}
        checkpointer.remove(2)
        for names, error, words in (
            (["model/c", "lr"], KeyError, "nothing named model/c; model has a, b"),
            (["model", "model/c"], KeyError, "nothing named model/c; model has a, b"),
            (["models"], KeyError, "named models; its state has model, "),
            (["turned", "models"], KeyError, "named models; its state has model, "),
            (["lr/0"], KeyError, "lr is not a dict"),
            (["list/0"], KeyError, "is a list, .* whole list, 'list'"),
            ("lr", TypeError, "iterable of names"),
            ([1], TypeError, "iterable of names"),
            (1, TypeError, "names is 1; it must be an iterable of names"),
        ):
            with pytest.raises(error, match=words):
                checkpointer.restore(names=names)


def change_tree(checkpointer, change):
    """Change the tree of step 1, and make the manifest fit."""
    folder = checkpointer.root / "step-1"
    said = json.loads((folder / "tree.json").read_text())
    change(said)
    text = json.dumps(said).encode()
    (folder / "tree.json").write_bytes(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    record = {"nbytes": len(text), "checksums": [f"{crc32c.crc32c(text):08x}"]}
    manifest["files"]["tree.json"] = record
    (folder / "manifest.json").write_text(json.dumps(manifest))


VIEW = {
    "tensor": "x",
    "dtype": "float32",
    "shape": [2],
    "view": {"offset": 0, "strides": [4]},
}
HOSTILE = {
    "no tensor": {"tensor": "y"},
    "a number": {"tensor": 3},
    "two kinds": {"tensor": "x", "array": "x"},
    "unknown word": {"tensor": "x", "code": "import os"},
    "unknown kind": {"pickle": "abc"},
    "no kind": {},
    "private": {"__class__": []},
    "method": {"value": []},
    "no float": {"float": "1e400"},
    "too few bits": {"float": "nan:7ff8"},
    "bits of a number": {"complex": ["nan:3ff0000000000000", "0.0"]},
    "no bytes": {"bytes": "ä"},
    "no complex": {"complex": [1]},
    "no scalar": {"scalar": ["O", ""]},
    "scalar of no dtype": {"scalar": ["(1 1)i4,i4", ""]},
    "scalar of a comma": {"scalar": [",", ""]},
    "scalar of no size": {"scalar": ["<f8", "AAA="]},
    "no dict": {"dict": []},
    "no items": {"items": [[1]]},
    "items twice": {"items": [[1, 1], [1, 2]]},
    # Multiples of the number by which Python reduces an int to its hash.
    "keys of one hash": {"items": [[n * (2**61 - 1), 0] for n in range(1, 102)]},
    "fields in one text": {"array": "x", "dtype": "<f4,<f4", "shape": [2]},
    "key of no kind": {"items": [[None, 1]]},
    "no tuple": {"tuple": {}},
    "no size": {"Size": [-1]},
    "no OrderedDict": {"OrderedDict": {"list": []}},
    "unknown dtype": VIEW | {"dtype": "os.system"},
    "no pairs": {"tensor": "x", "dtype": "complex128"},
    "no shape": VIEW | {"shape": [1.5]},
    "beyond the end": VIEW | {"view": {"offset": 12, "strides": [8]}},
    "before the beginning": VIEW | {"view": {"offset": -4, "strides": [4]}},
    "huge": VIEW | {"shape": [2**62], "view": {"offset": 0, "strides": [2**62]}},
    "between elements": VIEW | {"view": {"offset": 2, "strides": [4]}},
    "strides missing": VIEW | {"view": {"offset": 0, "strides": []}},
    "array beyond": {
        "array": "x",
        "dtype": "<f4",
        "shape": [2],
        "view": {"offset": 4, "strides": [-8]},
    },
    "array of objects": {"array": "x", "dtype": "O", "shape": [2]},
    "array of fields": {"array": "x", "dtype": [["a", "O"]], "shape": [2]},
    "array of nonsense": {"array": "x", "dtype": [[[[]]]], "shape": [2]},
    "array of other size": {"array": "x", "dtype": "<U1", "shape": [5]},
    "dtype of a list": VIEW | {"dtype": ["float32"]},
    "dtype of a dict": VIEW | {"dtype": {}},
    "gradient of an integer": VIEW | {"dtype": "int32", "requires_grad": True},
    "parameter of an array": {"array": "x", "parameter": True},
    "offset of nothing": VIEW | {"shape": [0], "view": {"offset": 17, "strides": [4]}},
    "more than there can be": VIEW
    | {"shape": [2**40, 2**40], "view": {"offset": 0, "strides": [0, 0]}},
    "too many dimensions": {"array": "x", "dtype": "<f4", "shape": [1] * 65},
    "dtype of arrays": {"array": "x", "dtype": "(2,)<f4", "shape": [2]},
    "no Counter": {"Counter": []},
    "no dtype": {"torch.dtype": "nn"},
    "no device": {"torch.device": "tree"},
    "no state_dict": {"state_dict": {}},
    "a state_dict of a list": {"state_dict": [[], {"dict": {}}]},
    "tensors in metadata": {"state_dict": [{"OrderedDict": {"dict": {}}}, {"tensor": "x"}]},
    "strides with gaps": {"tensor": "x", "strides": [8]},
    "strides of a part of an element": {"tensor": "x", "strides": [2]},
    "too many strides": {"tensor": "x", "strides": [4, 4]},
    "strides beside a view": VIEW | {"strides": [4]},
}


@pytest.mark.parametrize("node", HOSTILE.values(), ids=HOSTILE)
def test_hostile_trees_are_refused(checkpointer, node):
    checkpointer.save(1, {"x": torch.ones(4)})

    def change(said):
        said["state"]["dict"]["x"] = node

    change_tree(checkpointer, change)
    with pytest.raises(CheckpointError, match=r"tree\.json is damaged: state\['x'\]"):
        checkpointer.restore(1)


def test_an_array_has_no_more_dimensions_than_numpy_allows(checkpointer):
    """But a tensor may, also one that shares its memory."""
    base = torch.arange(4.0)
    state = {"base": base, "deep": base[:2].view([2] + [1] * 69)}
    checkpointer.save(1, state)
    restored = checkpointer.restore(1)
    assert torch.equal(restored["deep"].view(2), base[:2])
    assert restored["deep"].shape == state["deep"].shape
    checkpointer.save(1, {"x": state["deep"].clone()})

    def change(said):
        said["state"]["dict"]["x"] = {"array": "x"}

    change_tree(checkpointer, change)
    with pytest.raises(CheckpointError, match=r"state\['x'\] is stored with 70 dimensions"):
        checkpointer.restore(1)


@pytest.mark.parametrize("first", [{"strides": [4, 8]}, {}])
def test_memory_is_needed_once_for_each_stored_tensor(checkpointer, first):
    """Of a tensor in another order of elements, each name would need a copy."""
    checkpointer.save(1, {"x": torch.ones(2, 4)})
    turned = {"tensor": "x", "strides": [4, 8]}

    def change(said):
        said["state"]["dict"] = {"x": {"tensor": "x", **first}, "y": turned}

    change_tree(checkpointer, change)
    with pytest.raises(CheckpointError, match=r"damaged: state\['y'\] needs .* 'x'"):
        checkpointer.restore(1)


@pytest.mark.parametrize("which", ["state", "metadata"])
def test_a_tree_that_is_too_deep_is_damage(checkpointer, which):
    checkpointer.save(1, {"x": 1})
    for depth in (DEPTH_MAX + 2, 600, 100_000):
        text = "[" * depth + "]" * depth
        folder = checkpointer.root / "step-1"

        def change(said):
            said[which] = "HERE"

        change_tree(checkpointer, change)
        tree = (folder / "tree.json").read_text().replace('"HERE"', text)
        (folder / "tree.json").write_text(tree)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["tree.json"]["nbytes"] = len(tree)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"tree\.json"):
            checkpointer.restore(1) if which == "state" else checkpointer.metadata(1)
        if which == "metadata" and depth == 600:
            with Held(str(folder), 1) as held, pytest.raises(CheckpointError, match="deep"):
                held.plain_metadata()
        checkpointer.save(1, {"x": 1})


def channels_last(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_complex_tensor_has_an_address_that_torch_can_use(checkpointer, into, ordered):
    """Its numbers are stored as pairs of 8 bytes, and may begin at any of these."""
    wanted = channels_last(2, 3, 4, 4, dtype=torch.complex128)
    state = {"a": torch.ones(1, dtype=torch.float64), "z": wanted if ordered else wanted[0]}
    checkpointer.save(1, state)
    target = {name: torch.zeros_like(each) for name, each in state.items()}
    found = checkpointer.restore(into=target if into else None)["z"]
    assert found.data_ptr() % 16 == 0
    # Instructions that need aligned addresses end the process elsewhere.
    assert torch.equal(found.clone(), state["z"])


def strided_array(*shape):
    return np.zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]


TARGETS = {
    "channels_last": (
        lambda w: {"w": w, "flat": w.view(-1)},
        lambda: {"w": channels_last(2, 3, 2, 2), "flat": torch.zeros(24)},
    ),
    "permuted": (
        lambda w: {"w": w.view(4, 6), "part": w.view(-1)[3:]},
        lambda: {"w": torch.zeros(6, 4).T, "part": torch.zeros(21)},
    ),
    "arrays": (
        lambda w: {"w": w.double().view(24).numpy(), "part": None},
        lambda: {"w": strided_array(24), "part": np.zeros(20)},
    ),
    "both libraries": (
        lambda w: {"w": w.view(24), "array": w.view(24).numpy()},
        lambda: {"w": torch.zeros(48)[::2], "array": np.zeros(24, np.float32)},
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_views_are_right_whatever_the_strides_of_the_targets_are(checkpointer, kind):
    make, targets = TARGETS[kind]
    state, into = make(torch.arange(24.0).view(2, 3, 2, 2)), targets()
    if kind == "arrays":
        state["part"] = state["w"][4:]
    checkpointer.save(1, state)
    found = checkpointer.restore(into=into)
    for name, each in state.items():
        assert np.array_equal(np.asarray(found[name]), np.asarray(each))
        assert found[name] is into[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_strides_and_shared_memory_of_one_channel_are_kept(checkpointer, dtype):
    w = channels_last(8, 1, 3, 3, dtype=dtype)
    for state in ({"w": w, "tied": w}, {"part": w[:4], "w": w}):
        checkpointer.save(1, state)
        found = checkpointer.restore()
        other = "tied" if "tied" in state else "part"
        assert found["w"].stride() == w.stride()
        assert found["w"].data_ptr() == found[other].data_ptr()
        alone = checkpointer.restore(names=[other])[other]
        assert (alone.stride(), same(alone, state[other])) == (state[other].stride(), True)


WITH_ARRAYS = {
    "of 1 x 1": lambda: channels_last(8, 4, 1, 1),
    "of one channel": lambda: channels_last(8, 1, 3, 3),
    "of one element": lambda: torch.ones(8)[::4][:1],
}


@pytest.mark.parametrize("shape", WITH_ARRAYS)
def test_a_tensor_with_extents_of_1_is_kept_beside_its_array(checkpointer, shape):
    w = WITH_ARRAYS[shape]()
    state = {"w": w, "array": w.numpy(), "flat": w.numpy().reshape(-1)}
    checkpointer.save(1, state)
    into = {name: each + 1 for name, each in state.items()}
    into["w"] = torch.zeros(2 * w.numel())[::2].view(w.shape)
    for target in (None, into):
        found = checkpointer.restore(into=target)
        for name, each in state.items():
            assert np.array_equal(np.asarray(found[name]), np.asarray(each))
    found = checkpointer.restore()
    assert found["w"].data_ptr() == found["array"].__array_interface__["data"][0]


def test_another_default_device_changes_nothing(checkpointer):
    state = {"w": channels_last(2, 3, 4, 4), "a": torch.ones(3)}
    checkpointer.save(1, state)
    with torch.device("meta"):
        found = checkpointer.restore()
    assert found["w"].stride() == state["w"].stride()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_numbers_and_texts_keep_their_bits(checkpointer):
    def bits(value):
        parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
        return [struct.pack("<d", each).hex() for each in parts]

    odd = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    numbers = [math.nan, -math.nan, odd, math.inf, -0.0, complex(-math.nan, odd)]
    texts = [np.str_("a\0"), np.bytes_(b"a\0\0"), np.bytes_(b""), np.str_("\0")]
    # Lone surrogates, and a pair of them, which is not one character.
    texts += [np.str_("a\ud800"), np.str_("\ud83d\ude00")]
    checkpointer.save(1, {"numbers": numbers, "texts": texts})
    found = checkpointer.restore()
    assert list(map(bits, found["numbers"])) == list(map(bits, numbers))
    for one, other in zip(found["texts"], texts, strict=True):
        assert (type(one), one.tobytes(), len(one)) == (
            type(other),
            other.tobytes(),
            len(other),
        )


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_a_parameter_without_gradients_is_restored(tmp_path, dtype):
    state = torch.nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    Checkpointer(tmp_path).save(1, {"a": state})
    found = Checkpointer(tmp_path).restore()["a"]
    assert type(found) is torch.nn.Parameter
    assert not found.requires_grad
    assert torch.equal(found, state)


def test_a_conjugate_view_is_staged_at_any_address(checkpointer):
    """torch's kernel of conj() crashes where its target is not aligned."""
    value = torch.randn(2, dtype=torch.complex128).conj()
    state = {"before": torch.zeros(1, dtype=torch.float64), "value": value}
    checkpointer.save_async(1, state).result()
    assert torch.equal(checkpointer.restore()["value"], value)


@pytest.mark.parametrize("change", ["freed", "grown", "array resized"])
def test_memory_that_goes_away_during_a_save_is_an_error(monkeypatch, checkpointer, change):
    owner = np.ones(1 << 20) if change == "array resized" else torch.ones(1 << 20)
    state = {"a": torch.ones(3), "x": owner[: 1 << 19], "y": owner[10:]}

    def resize(*args):
        if change == "array resized":
            owner.resize(10, refcheck=False)
        else:
            owner.untyped_storage().resize_(0 if change == "freed" else 1 << 26)

    monkeypatch.setattr("nvmeio.checkpoint._saving.reserve", resize)
    with pytest.raises(RuntimeError, match=r"memory of state\['y'\] was changed"):
        checkpointer.save_async(1, state, stage=False).result()
    assert checkpointer.steps() == []


@pytest.mark.parametrize("way", ["save", "unstaged", "save_file"])
def test_a_tensor_can_be_resized_after_a_save(tmp_path, checkpointer, way):
    """Unlike after numpy(): FSDP frees the storages of whole parameters."""
    state = {"a": torch.ones(1000), "turned": torch.ones(30, 40).t()}
    if way == "save":
        checkpointer.save(1, state)
    elif way == "unstaged":
        checkpointer.save_async(1, state, stage=False).result()
    else:
        state["turned"] = state["turned"].contiguous()
        nvmeio.safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for each in state.values():
        each.untyped_storage().resize_(0)


def test_messages_about_a_hostile_tree_are_short(checkpointer):
    checkpointer.save(1, {"x": torch.ones(4)})

    def change(said):
        fields = [[f"field {n}", "<f4"] for n in range(10_000)]
        shown = {"array": "x", "dtype": fields, "shape": [2]}
        said["state"]["dict"] = {"x" * 10_000: shown}

    change_tree(checkpointer, change)
    with pytest.raises(CheckpointError, match="has the dtype") as told:
        checkpointer.restore(1)
    assert len(str(told.value)) < 3000


def test_an_aligned_array_is_filled(checkpointer):
    """Its dtype comes back without that flag, and is another one only as text."""
    fields = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    records = np.zeros(4, fields)
    records["b"] = 1, 2, 3, 4
    checkpointer.save(1, {"w": np.arange(3.0), "records": records})
    into = {"w": np.zeros(3), "records": np.ones(4, fields)}
    checkpointer.restore(into=into)
    assert np.array_equal(into["records"], records)
    assert into["w"].tolist() == [0, 1, 2]


def test_a_hostile_dtype_imports_nothing(checkpointer):
    checkpointer.save(1, {"x": torch.float32})

    def change(said):
        said["state"]["dict"]["x"] = {"torch.dtype": "_inductor"}

    change_tree(checkpointer, change)
    code = """
        import sys
        import torch
        from nvmeio.checkpoint import Checkpointer, CheckpointError
        try:
            Checkpointer(sys.argv[1]).restore(1)
        except CheckpointError:
            print("torch._inductor" in sys.modules)
    """
    program = [sys.executable, "-c", textwrap.dedent(code), checkpointer.root]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_long_strings_are_restored_with_little_memory(checkpointer, monkeypatch):
    """Such as the pickle of a sampler: its text takes less memory than many numbers."""
    state = {"sampler": bytes(range(256)) * (3 << 12), "text": "é" * 1000}
    checkpointer.save(1, state)
    available = "nvmeio._memory.available.available_bytes"
    monkeypatch.setattr(available, lambda: 48 << 20)
    assert checkpointer.restore(1) == state
    monkeypatch.setattr(available, lambda: 5 << 20)
    with pytest.raises(MemoryError, match=r"parsing .*tree\.json needs"):
        checkpointer.restore(1)


@pytest.mark.parametrize("way", ["save", "staged"])
@pytest.mark.parametrize("other", [[("time", "<f4"), ("id", "<u4")], "V8"])
def test_structured_arrays_that_share_memory_keep_their_fields(checkpointer, way, other):
    points = np.array([(1, 2), (3, 4)], [("x", "<i4"), ("y", "<i4")])
    found = through(checkpointer, {"points": points, "other": points.view(other)}, way)
    assert found["points"].dtype == points.dtype
    assert found["other"].dtype == np.dtype(other)
    assert np.shares_memory(found["points"], found["other"])


@pytest.mark.parametrize("way", ["save", "staged"])
@pytest.mark.parametrize("into", [False, True])
def test_gaps_between_the_fields_of_records_are_kept(checkpointer, way, into):
    """Or the bytes that were read would seem to differ from those that were saved."""
    record = np.dtype([("flag", "i1"), ("value", "<f8")], align=True)
    raw = np.random.default_rng(1).bytes(300 * 200 * record.itemsize)
    table = np.ndarray((300, 200), record, raw, order="F")
    found = through(checkpointer, {"table": table}, way)
    if into:
        found = {"table": np.zeros((300, 200), record, order="F")}
        checkpointer.restore(into=found)
    assert found["table"].dtype == record
    assert found["table"].T.tobytes() == raw
