"""Slices of tensors equal those of the safetensors package, or its errors."""

import math
import random
import sys

import numpy as np
import pytest

pytest.importorskip("safetensors")

import safetensors

from nvmeio._safetensors.header import build
from nvmeio._tensors.dtypes import BITS, FRAMEWORK_NAMES, framework_shape
from nvmeio._tensors.slices import plan

ROUNDS = 1500

# The implementation that reads an index, by framework and backend of safe_open().
RULES = {
    ("np", "mmap"): "safetensors",
    ("np", "pread"): "safetensors",
    ("pt", "mmap"): "torch",
    ("pt", "pread"): "safetensors",
}
# If a slice starts after its end, safetensors 0.8.0 panics, passes a negative size, fails
# to reshape, or returns an empty array of 2^60 rows or more.
BACKWARD = "starts after its end"


class Index:
    """An object that can be used as an int."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number

    def __repr__(self):
        return f"Index({self.number})"


class Failing:
    """An object whose conversion to an int fails."""

    def __index__(self):
        raise OSError("no number")


S = slice
MATRIX = (10, 5)
# Indices of a matrix, for either framework.
INDICES_OF_A_MATRIX = [
    *(3, -1, -10, -11, 10, 2**31, -(2**31) - 1, True, False, np.int64(2), np.array(3)),
    *(Index(2), Failing(), 1.0, "x", b"x", None, ..., (), [], [1], [0, 1], [True] * 10),
    *([True], [S(0, 2)], ["x"], [[0, 1], [1, 2]], range(3), {1}, {0: 1}, object()),
    *((...,), (..., 1), (1, ...), (..., 1, ...), (..., ...), (0, 1, ...), (..., -6)),
    *((None, 1), (1, None), ([],), ([0], 1), (S(None), [0]), (1, (2, 3)), (Index(9), "x")),
    *((-11, "x"), (S(-1), "x"), ("x", S(-1)), (..., "x", ...), (S(-1), -11), (..., "x")),
    *((1, 2), (1, -6), (1, 5), (1, 2, 3), (1, 2, "x"), (1, 2, S(0, 1)), (1, 2, -1)),
    *((11, 6), (11, -6), (S(2, None), 20), (S(2, None), -6), (12, S(0, 4, 0))),
    *(S(2, None), S(2, 4), S(-2, None), S(None, -1), S(2, 100), S(10, 10), S(10, None)),
    *(S(11, None), S(5, 2), S(5, 5), S(0, 0), S(None, 0), S(None), S(0, 10), S(0, 11)),
    *(S(0, 4, 2), S(None, None, 2), S(None, None, 1), S(1, 9, 3), S(0, 4, 0), S(0, 4, -1)),
    *(S(0, 4, "x"), S(0, 4, 1.5), S("x", 4), S(0.0, 4), S(Index(1), 4), S(True, 4)),
    *(S(2**70, None), S(2**64 - 1, None), S(0, 2**64 - 1), S(0, 2**64), S(-1, None, 0)),
    *(S(0, 2, 2**63), S(0, 2, 2**63 - 1), S(0, 2, -(2**70)), S(0, 2, True), S("x", -1)),
    *((S(None), S(1, 3)), (S(0, 0), S(1, 3)), (S(1, 3), S(0, 0)), (S(5, 2), S(1, 3))),
    *((S(1, 3), S(3, 1)), (S(5, 2, 2), S(1, 3)), (S(0, 9), S(3, 1, 2)), (1, S(3, 1))),
    *((S(None, None, 3), S(None, None, 2)), (S(4, 5, 7), S(0, 5, 4)), (S(0, 0, 2), 9)),
    *(np.array([0, 2]), np.array([True] * 10), np.array([[1], [0]]), np.array(True)),
]


def torch_indices(torch):
    """Return indices of a matrix that are or contain tensors."""
    tensor = torch.tensor
    mask = torch.arange(50).reshape(MATRIX) % 3 == 0
    return [
        *(tensor([0, 2]), tensor(3), tensor([3]), tensor(-1), tensor(1.0), tensor([10])),
        *(tensor([True] * 10), tensor([True]), tensor(True), tensor(False), mask),
        *((tensor([0, 1]), tensor([1, 2])), (tensor([[0], [1]]), tensor([1, 2]))),
        *((S(1, 3), tensor([4, 0])), (tensor([9, 8]), 1), (..., tensor([1, 1, 1]))),
        *((tensor([0]), None, tensor([1])), (None, tensor([3, 4, 5])), (mask, 0)),
        *((tensor([-1, 0]), ...), tensor([], dtype=torch.int64), tensor([1.5])),
        *(tensor([1, 0], dtype=torch.uint8), (S(0, 2), tensor([True, False] * 2))),
        *((tensor([5, 6, 7]), S(None)), ([7, 8, 9], S(None)), [tensor([1]), tensor([2])]),
    ]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """A file of tensors, with dtype, shape and bytes of each."""
    rng = random.Random("tensors")
    shapes = [MATRIX, (), (0, 3), (7,), (2, 3, 4), (3, 1, 2, 4), (1,), (4, 0, 2)]
    listed = []
    for shape in shapes:
        for dtype in BITS:
            bits = BITS[dtype]
            # With an extent of 8 along one dimension, F4 and F6 have whole bytes.
            fitting = shape
            if bits * math.prod(shape) % 8:
                place = rng.randrange(len(shape) + 1)
                fitting = (*shape[:place], 8, *shape[place + 1 :])
            listed.append((f"{dtype} {shape}", dtype, fitting))
    header, layout = build(listed)
    data = bytes(range(251)) * (layout.data_bytes // 251 + 1)
    # Every byte must be a valid bool.
    data = data[: layout.data_bytes].translate(bytes(n % 2 for n in range(256)))
    noise = rng.randbytes(layout.data_bytes)
    content = bytearray(noise)
    for each in layout.tensors:
        if each.dtype == "BOOL":
            content[each.begin : each.end] = data[each.begin : each.end]
    path = tmp_path_factory.mktemp("slices") / "file"
    path.write_bytes(header + content)
    known = {
        each.name: (each.dtype, each.shape, bytes(content[each.begin : each.end]))
        for each in layout.tensors
    }
    return path, known


def as_bytes(result, framework):
    """Return the bytes of a slice by safetensors."""
    if framework == "np":
        return result.tobytes()
    import torch

    flat = result.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def of_safetensors(file, framework, name, index):
    """Return shape and bytes of a slice by safetensors, or its error."""
    try:
        result = file.get_slice(name)[index]
    except BaseException as error:  # a panic of Rust is no Exception
        return type(error).__name__, str(error)
    return tuple(result.shape), as_bytes(result, framework)


def of_nvmeio(tensor, index, rules):
    """Return shape and bytes of a plan by nvmeio, or its error."""
    dtype, shape, data = tensor
    try:
        result, offsets, run = plan(index, shape, BITS[dtype], rules=rules)
    except Exception as error:  # any error, which is compared
        return type(error).__name__, str(error)
    assert offsets.dtype == np.int64
    assert (run > 0) == (offsets.size > 0)
    assert all(0 <= begin <= len(data) - run for begin in offsets.tolist())
    return result, b"".join(data[begin : begin + run] for begin in offsets.tolist())


def difference(file, framework, rules, name, tensor, index):
    """Return how two slices differ, or None."""
    theirs = of_safetensors(file, framework, name, index)
    ours = of_nvmeio(tensor, index, rules)
    same = ours == theirs or is_excused(ours, theirs)
    return None if same else f"{name}[{index!r}]: {ours} instead of {theirs}"


def is_excused(ours, theirs):
    """Return whether two results, or the messages of two errors, may differ."""
    if theirs[0] == "NotImplementedError" and "index_cpu" in theirs[1]:
        # Torch 2.9 cannot index float8.
        return sys.modules["torch"].__version__ < (2, 10)
    if not isinstance(ours[0], str):
        return False
    if not isinstance(theirs[0], str):
        return BACKWARD in ours[1] and max(theirs[0]) > 1 << 60
    if BACKWARD in ours[1] or theirs[0] == "PanicException":
        return True
    # torch's message for a slice with the largest step depends on the size of its source.
    return ours[0] == theirs[0] == "RuntimeError" and "overflow" in ours[1]


@pytest.mark.parametrize(("framework", "backend"), RULES)
def test_indices_are_accepted_or_refused_as_by_safetensors(tensors, framework, backend):
    indices = [*INDICES_OF_A_MATRIX]
    if framework == "pt":
        indices += torch_indices(pytest.importorskip("torch"))
    path, known = tensors
    rules = RULES[framework, backend]
    with safetensors.safe_open(path, framework, backend=backend) as file:
        for shape in (MATRIX, (), (0, 3), (2, 3, 4)):
            name = f"U8 {shape}"
            for index in indices:
                found = difference(file, framework, rules, name, known[name], index)
                assert found is None


def random_item(rng, extent, torch):
    """Return an index of one dimension, mostly within it."""
    drawn = rng.randrange(12 if torch else 8)
    near = range(-extent - 1, extent + 2) if rng.random() < 0.1 else range(max(extent, 1))
    if drawn < 2:
        return rng.choice(near)
    if drawn < 7:
        bounds = sorted(rng.choices(range(extent + 1), k=2))
        start, stop = (rng.choice((None, bound, bound)) for bound in bounds)
        if rng.random() < 0.1:
            start, stop = rng.choice(((start, rng.choice(near)), (rng.choice(near), stop)))
        return slice(start, stop, rng.choice((None, None, 1, 2, 3, extent + 1)))
    if drawn == 7:
        return ...
    if drawn == 8:
        return None
    numbers = [rng.choice(near) for _ in range(rng.randrange(5))]
    if drawn == 9:
        return numbers
    if drawn == 10:
        return torch.tensor([rng.random() < 0.5 for _ in range(extent)], dtype=torch.bool)
    if rng.random() < 0.5:
        start = rng.choice(range(max(extent, 1)))
        numbers = [*range(start, extent)]
    return torch.tensor(numbers, dtype=torch.int64)


def random_index(rng, shape, torch):
    """Return an index of a tensor."""
    items = [random_item(rng, extent, torch) for extent in shape]
    if torch and items.count(...) > 1:
        # Otherwise torch 2.13 reads past the shape, with unpredictable messages.
        items = [slice(None) if item is ... else item for item in items]
    items = items[: rng.choice((1, 2, len(items), len(items), len(items) + 1))]
    if len(items) == 1 and rng.random() < 0.5:
        return items[0]
    return tuple(items)


@pytest.mark.parametrize(("framework", "backend"), RULES)
def test_random_indices_select_what_safetensors_selects(tensors, framework, backend):
    torch = pytest.importorskip("torch") if framework == "pt" else None
    rules = RULES[framework, backend]
    path, known = tensors
    # Other tensors have no dtype there, so no slices.
    names = [name for name in known if is_readable(framework, known[name][0])]
    rng = random.Random(f"{framework} {backend}")
    taken = 0
    with safetensors.safe_open(path, framework, backend=backend) as file:
        for _ in range(ROUNDS):
            name = rng.choice(names)
            index = random_index(rng, known[name][1], torch if rules == "torch" else None)
            found = difference(file, framework, rules, name, known[name], index)
            assert found is None
            taken += isinstance(of_nvmeio(known[name], index, rules)[0], tuple)
    assert taken > ROUNDS // 3


def is_readable(framework, dtype):
    """Return whether a framework has the dtype, with elements of whole bytes."""
    if dtype not in FRAMEWORK_NAMES or dtype == "F4":
        return False
    return framework == "pt" or not dtype.startswith(("F8", "BF"))


def test_torch_checks_no_range_where_nothing_is_selected(tensors):
    torch = pytest.importorskip("torch")
    path, known = tensors
    with safetensors.safe_open(path, "pt", backend="mmap") as file:
        for name, fits in (("U8 (4, 0, 2)", True), ("U8 (2, 3, 4)", False)):
            index = torch.tensor([99])
            assert difference(file, "pt", "torch", name, known[name], index) is None
            shape, _ = of_nvmeio(known[name], index, "torch")
            assert shape == ((1, 0, 2) if fits else "IndexError")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_parts_of_bytes_are_refused_where_safetensors_refuses_them(tensors, dtype):
    path, known = tensors
    rng = random.Random(dtype)
    refused = 0
    with safetensors.safe_open(path, "np") as file:
        for name in known:
            if known[name][0] != dtype:
                continue
            for _ in range(300):
                index = random_index(rng, known[name][1], None)
                theirs = of_safetensors(file, "np", name, index)
                ours = of_nvmeio(known[name], index, "safetensors")
                if isinstance(ours[0], tuple):
                    # numpy lacks the dtype, which is noticed after the index was read.
                    assert theirs[0] == "AttributeError" or "not understood" in theirs[1]
                elif BACKWARD not in ours[1]:
                    assert ours == theirs
                    refused += "subbytes" in ours[1]
    assert refused > 100


def test_torch_refuses_slices_of_f4(tensors):
    pytest.importorskip("torch")
    path, known = tensors
    with safetensors.safe_open(path, "pt") as file:
        for name, tensor in known.items():
            if tensor[0] == "F4" and math.prod(tensor[1]):
                for index in (..., 0, slice(None)):
                    theirs = of_safetensors(file, "pt", name, index)
                    assert of_nvmeio(tensor, index, "torch") == theirs
                    assert theirs[0] == "RuntimeError"


# For a tensor of (6, 5, 4) with 2 bytes an element: an index, its extents and their length.
RUNS = {
    "all of it": (..., 1, 240),
    "rows": (S(2, 5), 1, 120),
    "one row": (3, 1, 40),
    "every other row": (S(None, None, 2), 3, 40),
    "columns": ((S(None), S(1, 3)), 6, 16),
    "columns of one row": ((3, S(1, 3)), 1, 16),
    "the last of each": ((..., S(3, 4)), 30, 2),
    "nothing": (S(2, 2), 0, 0),
}


@pytest.mark.parametrize("rules", ["safetensors", "torch"])
@pytest.mark.parametrize("what", RUNS)
def test_neighbours_are_one_extent(what, rules):
    if rules == "torch":
        pytest.importorskip("torch")
    index, count, run_bytes = RUNS[what]
    found = plan(index, (6, 5, 4), 16, rules=rules)
    assert (found.offsets.size, found.run_bytes) == (count, run_bytes)


def test_chosen_rows_are_extents():
    torch = pytest.importorskip("torch")
    for index, count, run_bytes in (
        ([0, 5], 2, 40),
        ([1, 2, 3], 1, 120),
        (torch.tensor([1, 2, 4, 5]), 2, 80),
        (torch.tensor([5, 4, 3]), 3, 40),
        ((torch.tensor([0, 2]), slice(1, 3)), 2, 16),
        (torch.tensor([True, True, False, False, True, True]), 2, 80),
        (([0, 0], [1, 2]), 1, 16),
    ):
        found = plan(index, (6, 5, 4), 16, rules="torch")
        assert (found.offsets.size, found.run_bytes) == (count, run_bytes)


def test_a_plan_needs_no_memory_for_the_tensor():
    torch = pytest.importorskip("torch")
    shape = (1 << 20, 1 << 20, 4)
    for index in (S(5, 9), [7], torch.tensor([3, 2]), (..., 1, 0, 0)):
        if index == (..., 1, 0, 0):
            index = (1, 0, 0)
        found = plan(index, shape, 16, rules="torch")
        assert found.offsets.size < 3


def test_a_plan_is_the_same_without_gradients_and_on_another_default_device():
    torch = pytest.importorskip("torch")
    expected = plan((S(1, 3), [0, 2]), MATRIX, 8, rules="torch")
    with torch.inference_mode():
        found = plan((S(1, 3), [0, 2]), MATRIX, 8, rules="torch")
        assert plan(S(1, 3), MATRIX, 8, rules="torch").run_bytes == 10
    with torch.device("meta"):
        again = plan((S(1, 3), [0, 2]), MATRIX, 8, rules="torch")
    for other in (found, again):
        assert other.shape == expected.shape
        assert other.offsets.tolist() == expected.offsets.tolist()


def test_the_shape_is_the_headers():
    assert framework_shape("F4", plan(S(0, 2), (4, 6), 4).shape) == (2, 3)
