"""Tensors of any dtype, layout, class and history are written and read."""

import contextlib
import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest

import nvmeio
from helpers import SLOW, plugged, routes

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from nvmeio.torch import _tensors as tensors  # noqa: E402

EXCHANGE = "__dlpack_c_exchange_api__"

# torch warns about complex32, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Every dtype except the quantized ones, which are refused.
DTYPES = sorted(
    {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)


@pytest.fixture(scope="module")
def handle():
    """A handle of the default engine: memory is the same for all of them."""
    with nvmeio.Handle() as handle:
        yield handle


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data"


@pytest.fixture(params=["exchange table", "methods"])
def route(request, monkeypatch):
    """Run a test with torch's exchange table and without it, as with an older torch."""
    if request.param == "methods":
        monkeypatch.delattr(torch.Tensor, EXCHANGE, raising=False)
    elif not hasattr(torch.Tensor, EXCHANGE):
        pytest.skip("this torch has no DLPack exchange table")
    return request.param


def random_tensor(dtype, *shape):
    """Return a tensor of random bytes, so that every bit counts."""
    size = int(np.prod(shape)) * dtype.itemsize
    content = bytearray(np.random.default_rng(7).bytes(max(size, 1)))
    return torch.frombuffer(content, dtype=torch.uint8)[:size].view(dtype).reshape(shape)


def content_of(tensor):
    """Return the bytes of a tensor in C order, without nvmeio."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    integers = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
    opaque = dense.view(getattr(torch, integers[tensor.element_size()]))
    return opaque.contiguous().numpy().tobytes()


@contextlib.contextmanager
def calls_of(function):
    """Count the calls of a Python function."""
    calls = []

    def notice(frame, event, _):
        if event == "call" and frame.f_code is function.__code__:
            calls.append(True)

    sys.setprofile(notice)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_to_disk_and_back_bit_by_bit(handle, path, dtype):
    expected = random_tensor(dtype, 5, 7)
    before = routes(handle)
    assert handle.submit_write(expected, path).wait() == expected.nbytes
    assert path.read_bytes() == content_of(expected)
    target = torch.empty_like(expected)
    assert handle.submit_read(target, path).wait() == expected.nbytes
    assert content_of(target) == content_of(expected)
    assert (routes(handle) - before).total() == 2 * expected.nbytes


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_of_every_dtype_keep_their_bits(handle, path, dtype):
    expected = random_tensor(dtype, 6, 8).t()
    handle.submit_write(expected, path).wait()
    assert path.read_bytes() == content_of(expected)
    target = torch.empty(6, 8, dtype=dtype).t()
    handle.submit_read(target, path).wait()
    assert content_of(target) == content_of(expected)


def test_ordinary_tensors_are_acquired_without_python_code(handle, path):
    if not hasattr(torch.Tensor, EXCHANGE):
        pytest.skip("this torch has no DLPack exchange table")
    source = torch.arange(1000)
    with calls_of(tensors.export) as calls:
        for tensor in (source, source[10:], torch.nn.Parameter(torch.ones(3)), source[:0]):
            handle.submit_write(tensor, path).wait()
            handle.submit_read(tensor, path).wait()
        assert not calls
        handle.submit_write(source[::2], path).wait()
    assert calls


LAYOUTS = {
    "contiguous": lambda base: base,
    "rows": lambda base: base[1:3],
    "column": lambda base: base[:, :, 1],
    "permuted": lambda base: base.permute(2, 0, 1),
    "steps": lambda base: base[::2, 1::2],
    "0-d": lambda base: base[1, 2, 3],
    "no element": lambda base: base[:, 2:2],
    "axis of one": lambda base: base[:, 1:2, ::2],
    "new axis": lambda base: base[:, None, ::2],
    "channels last": lambda base: base[None].to(memory_format=torch.channels_last)[0],
}


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_of_a_view_is_in_c_order(handle, path, layout):
    view = LAYOUTS[layout](torch.arange(4 * 5 * 6).reshape(4, 5, 6))
    assert handle.submit_write(view, path).wait() == view.nbytes
    assert path.read_bytes() == view.contiguous().numpy().tobytes()


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"channels last"}))
def test_a_read_into_a_view_changes_nothing_else(handle, path, layout):
    base = torch.full((4, 5, 6), -1)
    view = LAYOUTS[layout](base)
    content = torch.arange(view.numel()).reshape(view.shape)
    path.write_bytes(content.numpy().tobytes())
    expected = base.clone()
    LAYOUTS[layout](expected).copy_(content)
    assert handle.submit_read(view, path).wait() == view.nbytes
    assert torch.equal(base, expected)


class Tagged(torch.Tensor):
    """A subclass that torch dispatches by __torch_function__."""


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(64, requires_grad=True),
        lambda: torch.zeros(64, requires_grad=True) * 2,
        lambda: torch.nn.Parameter(torch.zeros(64)),
        lambda: torch.zeros(64).as_subclass(Tagged),
        lambda: torch.nn.Parameter(torch.zeros(8, 8)).t(),
        lambda: torch.zeros(8, 8).as_subclass(Tagged).t(),
        torch.inference_mode()(lambda: torch.zeros(64)),
        torch.inference_mode()(lambda: torch.zeros(8, 8).t()),
    ],
    ids=[
        "leaf", "non-leaf", "Parameter", "subclass",
        "strided Parameter", "strided subclass", "inference", "strided inference",
    ],
)  # fmt: skip
def test_tensors_with_autograd_and_of_subclasses_are_transferred(handle, path, make):
    expected = torch.rand(make().shape)
    handle.submit_write(expected, path).wait()
    target = make()
    handle.submit_read(target, path).wait()
    assert torch.equal(target.detach().as_subclass(torch.Tensor), expected)
    handle.submit_write(target, path).wait()
    assert path.read_bytes() == expected.numpy().tobytes()


def test_a_strided_read_ignores_the_callers_dispatch_mode(handle, path):
    path.write_bytes(np.arange(64.0).tobytes())
    target = torch.zeros(8, 8, dtype=torch.float64)
    with torch.inference_mode(), torch.device("meta"):
        handle.submit_read(target.t(), path).wait()
    assert torch.equal(target.t().flatten(), torch.arange(64.0, dtype=torch.float64))


LAZY = {
    "conj": lambda: random_tensor(torch.complex64, 3, 5).conj(),
    "strided conj": lambda: random_tensor(torch.complex64, 3, 5).conj()[:, ::2],
    "neg": lambda: torch._neg_view(torch.arange(15.0)),
    "imag of conj": lambda: random_tensor(torch.complex128, 3, 5).conj().imag,
    "neg of one element": lambda: random_tensor(torch.complex64, 1).conj().imag,
}


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_lazy_views_are_resolved_by_a_write(handle, path, make):
    source = make()
    assert source.is_conj() or source.is_neg()
    handle.submit_write(source, path).wait()
    assert path.read_bytes() == content_of(source)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_lazy_views_are_refused_by_a_read(handle, path, make):
    path.write_bytes(bytes(4096))
    target = make()
    before = content_of(target)
    with pytest.raises(ValueError, match=r"lazy (conj|neg) view; pass"):
        handle.submit_read(target, path)
    assert content_of(target) == before


@pytest.mark.usefixtures("route")
def test_write_of_an_expanded_tensor_repeats_it(handle, path):
    source = torch.arange(3)[:, None].expand(3, 1000)
    assert handle.submit_write(source, path).wait() == 24000
    assert path.read_bytes() == source.contiguous().numpy().tobytes()


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(10).unfold(0, 3, 1),
        torch.zeros(10).as_strided((3, 2), (1, 1)),
    ],
    ids=["expanded", "unfolded", "equal strides"],
)
def test_read_into_overlapping_elements_is_refused(handle, path, target):
    path.write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="elements overlap"):
        handle.submit_read(target, path)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, like DTensor and many quantized tensors."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def fake_tensor():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(64)


REFUSED = {
    "sparse_coo": lambda: torch.eye(8).to_sparse(),
    "sparse_csr": lambda: torch.eye(8).to_sparse_csr(),
    "_mkldnn": lambda: torch.eye(8).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8),
    "meta device": lambda: torch.empty(64, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "is nested": lambda: torch.nested.nested_tensor(
        [torch.ones(3), torch.ones(2)], layout=torch.jagged
    ),
    "no memory of its own": lambda: Wrapper(torch.ones(64)),
    "FakeTensor": fake_tensor,
    "(?i)uninitialized|not initialized": torch.nn.UninitializedParameter,
}


@pytest.mark.usefixtures("route")
# torch warns that some of them are deprecated.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("operation", ["submit_read", "submit_write"])
@pytest.mark.parametrize("words", REFUSED)
def test_tensors_that_are_no_plain_array_are_refused_by_name(
    handle, path, words, operation
):
    path.write_bytes(bytes(4096))
    tensor = REFUSED[words]()
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(handle, operation)(tensor, path)


@pytest.mark.usefixtures("route")
def test_a_tensor_inside_vmap_is_refused(handle, path):
    def save(row):
        handle.submit_write(row, path)
        return row

    with pytest.raises(TypeError, match="no memory of its own"):
        torch.func.vmap(save)(torch.zeros(3, 4))


@pytest.mark.parametrize("source", [torch.float32, torch.nn.Linear(2, 2)], ids=str)
def test_other_objects_of_torch_are_refused_by_name(handle, path, source):
    with pytest.raises(TypeError, match=f"not torch.*{type(source).__name__}"):
        handle.submit_write(source, path)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("layout", ["contiguous", "permuted", "0-d", "rows"])
def test_a_read_counts_as_a_change_when_it_lands(handle, path, layout):
    path.write_bytes(bytes(4096))
    base = torch.zeros(4, 5, 6)
    view = LAYOUTS[layout](base)
    handle.submit_write(view, path).wait()
    assert base._version == 0
    request = handle.submit_read(view, path)
    assert base._version == 0
    request.wait()
    assert base._version == 1
    with torch.inference_mode():
        handle.submit_read(view, path).wait()
    assert base._version == 2


def test_a_failed_read_counts_as_a_change_of_memory_it_may_have_written(handle, path):
    path.write_bytes(bytes(100))
    whole = torch.zeros(50)
    rows = torch.zeros(50, 2)[:, 0]
    for tensor in (whole, rows):
        with pytest.raises(OSError, match="past the end"):
            handle.submit_read(tensor, path).wait()
    assert whole._version == 1
    # Only the staging copy was written.
    assert rows._version == 0


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_backward_notices_that_a_saved_tensor_was_overwritten(handle, path, strided):
    path.write_bytes(bytes(4096))
    weight = torch.ones(4, 4, requires_grad=True)
    saved = torch.ones(4, 4)
    loss = (weight * saved).sum()
    handle.submit_read(saved.t() if strided else saved, path).wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


VANISH = {
    "deleted": lambda tensor: None,
    "set_": lambda tensor: tensor.set_(),
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(3)),
}


@pytest.mark.all_combinations
@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("vanish", VANISH.values(), ids=VANISH)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("operation", ["submit_read", "submit_write"])
def test_memory_lives_until_the_request_releases_it(
    handle, path, operation, strided, vanish
):
    path.write_bytes(bytes(range(256)) * 2)
    memory = np.zeros((8, 8))
    alive = weakref.ref(memory)
    tensor = torch.from_numpy(memory)
    if strided:
        tensor = tensor.t()
    request = getattr(handle, operation)(tensor, path)
    vanish(tensor)
    del tensor, memory
    gc.collect()
    # A tensor that was copied at submission need not be kept.
    if operation == "submit_read" or not strided:
        assert alive() is not None
    request.wait()
    gc.collect()
    assert alive() is None


class Asked(torch.Tensor):
    """A subclass that refuses every call of a method."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


ASKING = {
    "write": lambda handle, path, tensor: handle.submit_write(tensor, path).wait(),
    "read": lambda handle, path, tensor: handle.submit_read(tensor, path).wait(),
    "many": lambda handle, path, tensor: handle.read_many([(tensor, path, 0)]),
    "gather": lambda handle, path, tensor: handle.gather(path, [0], 64, tensor),
    "scatter": lambda handle, path, tensor: handle.scatter(path, [0], 64, tensor),
}


@pytest.mark.parametrize("call", ASKING.values(), ids=ASKING)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_a_transfer_calls_no_method_of_a_subclass(tmp_path, call, strided):
    (tmp_path / "data").write_bytes(bytes(range(64)))
    memory = torch.zeros(8, 16, dtype=torch.uint8)
    plain = memory[:, ::2] if strided else memory[:4]
    with nvmeio.Handle() as handle:
        call(handle, tmp_path / "data", plain.as_subclass(Asked))
    assert plain.numpy().tobytes() == (tmp_path / "data").read_bytes()


def resized_as_out(tensor):
    torch.add(torch.zeros(1 << 16), 0, out=tensor)


FREED = {
    "resize_": lambda tensor: tensor.resize_(1 << 16),
    "out": resized_as_out,
    "storage to nothing": lambda tensor: tensor.untyped_storage().resize_(0),
    "storage grown": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
    "shared": lambda tensor: tensor.share_memory_(),
}

# Each starts a request in memory of 4096 bytes; whether it uses the tensor's own.
USES = {
    "write": (lambda handle, path, t: handle.submit_write(t, path), True),
    "read": (lambda handle, path, t: handle.submit_read(t, path), True),
    "subclass": (
        lambda handle, path, t: handle.submit_read(t.as_subclass(Tagged), path), True
    ),
    "strided read": (lambda handle, path, t: handle.submit_read(t[::2], path), False),
    "many": (lambda handle, path, t: handle.submit_read_many([(t, path, 0)]), True),
    "strided many": (
        lambda handle, path, t: handle.submit_read_many([(t[::2], path, 0)]), False
    ),
    "gather": (lambda handle, path, t: handle.submit_gather(path, [0], 64, t), True),
    "strided gather": (
        lambda handle, path, t: handle.submit_gather(path, [0], 64, t[::2]), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("free", FREED.values(), ids=FREED)
@pytest.mark.parametrize(("submit", "in_place"), USES.values(), ids=USES)
def test_memory_that_is_freed_under_a_request_is_an_error(
    tmp_path, recwarn, submit, in_place, free
):
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    tensor = torch.ones(1024)
    with nvmeio.Handle(**SLOW) as handle, plugged(handle, tmp_path):
        request = submit(handle, path, tensor)
        free(tensor)
        if in_place:
            # Otherwise it would read into memory that is no longer ours.
            request.cancel()
    with pytest.raises(RuntimeError, match="freed or moved"):
        request.wait()


KEPT = {
    "set_": lambda tensor: tensor.set_(),
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(3)),
    "made smaller": lambda tensor: tensor.resize_(10),
    "detached": lambda tensor: tensor.detach_(),
}


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("nbytes", [0, 4])
def test_a_tensor_whose_storage_was_freed_is_refused(handle, path, layout, nbytes):
    freed = torch.zeros(2, 1 << 18)[:, :: 1 + (layout == "strided")]
    whole = torch.ones(freed.shape)
    handle.write(whole, path)
    freed.untyped_storage().resize_(nbytes)
    for call in (
        lambda: handle.read(freed, path),
        lambda: handle.write(freed, path),
        lambda: nvmeio.memcpy(whole, freed),
        lambda: nvmeio.memcpy(freed, whole),
    ):
        with pytest.raises(TypeError, match=f"was freed: it has {nbytes} bytes, too few"):
            call()
    assert whole.min() == 1
    assert path.stat().st_size == whole.nbytes


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize(("submit", "in_place"), USES.values(), ids=USES)
def test_a_change_that_keeps_the_memory_is_no_error(tmp_path, submit, in_place, change):
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    tensor = torch.ones(1024)
    with nvmeio.Handle(**SLOW) as handle, plugged(handle, tmp_path):
        request = submit(handle, path, tensor)
        change(tensor)
    assert request.wait() == request.nbytes


def test_a_strided_write_needs_the_memory_only_until_it_is_submitted(tmp_path):
    tensor = torch.arange(1024)
    with nvmeio.Handle(**SLOW) as handle, plugged(handle, tmp_path):
        request = handle.submit_write(tensor[::2], tmp_path / "data")
        tensor.untyped_storage().resize_(0)
    assert request.wait() == 4096
    assert (tmp_path / "data").read_bytes() == np.arange(0, 1024, 2).tobytes()


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_a_read_fills_the_memory_at_submission(handle, path, strided):
    expected = np.arange(64.0).reshape(8, 8)
    path.write_bytes(expected.tobytes())
    memory = np.zeros((8, 8))
    tensor = torch.from_numpy(memory)
    tensor = tensor.t() if strided else tensor
    request = handle.submit_read(tensor, path)
    tensor.data = torch.full((8, 8), -1.0, dtype=torch.float64)
    request.wait()
    np.testing.assert_array_equal(memory.T if strided else memory, expected)
    assert tensor.eq(-1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_locked_tensors_have_the_dtype_of_the_example(dtype):
    example = torch.empty(1, dtype=dtype)
    tensor = tensors.locked_tensor(1000, example)
    assert tensor.shape == (1000,)
    assert tensor.dtype == dtype
    tensor.view(torch.uint8).fill_(7)
    assert content_of(tensor) == b"\7" * tensor.nbytes


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_every_view_of_a_locked_tensor_is_pinned(count):
    tensor = tensors.locked_tensor(count, torch.zeros(1))
    address = tensors.storage_address(tensor)
    assert address != 0
    views = (tensor[count // 2 :], tensor[:0], tensor.view(torch.uint8), tensor[::2])
    for view in (tensor, *views):
        assert tensors.storage_address(view) == address
        assert tensors.is_pinned(view)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_locked_tensor_lives_as_long_as_its_views(count):
    tensor = tensors.locked_tensor(count, torch.zeros(1))
    died = []
    weakref.finalize(tensor, died.append, True)
    view = tensor[:count].view(1, -1)
    assert view._base is tensor
    del tensor
    gc.collect()
    assert not died
    del view
    gc.collect()
    assert died


def test_a_locked_tensor_is_written_and_read(handle, path):
    source = tensors.locked_tensor(5000, torch.zeros(1, dtype=torch.float16))
    source.copy_(torch.arange(5000))
    handle.submit_write(source, path).wait()
    target = tensors.locked_tensor(5000, source)
    handle.submit_read(target, path).wait()
    assert torch.equal(target, source)


def test_pool_memory_lives_as_long_as_a_view_of_it():
    tensor = tensors.locked_tensor(1 << 20, torch.zeros(1))[5:10]
    tensor.fill_(3)
    gc.collect()
    others = [tensors.locked_tensor(1 << 20, torch.zeros(1)).zero_() for _ in range(3)]
    assert tensor.tolist() == [3] * 5
    assert {tensors.storage_address(other) for other in others}.isdisjoint(
        {tensors.storage_address(tensor)}
    )


@pytest.mark.parametrize(
    ("count", "example", "error", "words"),
    [
        (-1, torch.zeros(1), ValueError, "num_elem is -1"),
        (1.5, torch.zeros(1), TypeError, "float"),
        (1, torch.float32, TypeError, "expected a tensor"),
    ],
)
def test_locked_tensors_refuse_bad_arguments(count, example, error, words):
    with pytest.raises(error, match=words):
        tensors.locked_tensor(count, example)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(10),
        lambda: torch.zeros(0),
        lambda: torch.zeros(10, device="meta"),
        lambda: torch.eye(3).to_sparse(),
    ],
    ids=["ordinary", "empty", "meta", "sparse"],
)
def test_other_tensors_are_not_pinned(make):
    assert not tensors.is_pinned(make())


LAZY_IMPORT = """
import sys
import nvmeio
assert "torch" not in sys.modules, "import nvmeio needs numpy alone"
import torch
with nvmeio.Handle() as handle:
    handle.submit_write(b"bytes", sys.argv[1] + ".bytes").wait()
    assert "nvmeio.torch" not in sys.modules
    handle.submit_write(torch.arange(10), sys.argv[1]).wait()
    assert "nvmeio.torch" in sys.modules
"""


def test_the_first_tensor_loads_nvmeio_torch(path):
    subprocess.run([sys.executable, "-c", LAZY_IMPORT, str(path)], check=True, timeout=120)
    assert path.read_bytes() == np.arange(10).tobytes()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"channels last"}))
def test_tensors_on_a_device_are_written_and_read(handle, path, dtype, layout):
    base = random_tensor(torch.uint8, 4, 5, 6).gt(127).to(dtype).cuda()
    view = LAYOUTS[layout](base)
    assert handle.submit_write(view, path).wait() == view.nbytes
    assert path.read_bytes() == content_of(view.cpu())
    target = torch.zeros_like(base)
    expected = target.clone()
    LAYOUTS[layout](expected).copy_(view)
    handle.submit_read(LAYOUTS[layout](target), path).wait()
    assert torch.equal(target, expected)


@needs_cuda
def test_a_large_tensor_on_a_device_is_staged_in_pieces(handle, path):
    source = torch.randint(0, 255, ((100 << 20) + 3,), dtype=torch.uint8, device="cuda")
    handle.submit_write(source, path).wait()
    target = torch.zeros_like(source)
    version = target._version
    handle.submit_read(target, path).wait()
    assert torch.equal(target, source)
    assert target._version > version


@needs_cuda
def test_memory_pinned_by_torch_counts_as_pinned(handle, path):
    pinned = torch.arange(1000).pin_memory()
    assert tensors.is_pinned(pinned)
    assert tensors.is_pinned(pinned[3:])
    assert not tensors.is_pinned(pinned.cuda())
    handle.submit_write(pinned, path).wait()
    assert path.read_bytes() == np.arange(1000).tobytes()
