"""Everything with the buffer protocol can be written from and read into."""

import array
import ctypes
import gc
import io
import mmap
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import nvmeio
from helpers import routes
from nvmeio._memory.strides import may_overlap
from nvmeio._native.buffer import Buffer

DTYPES = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g",
    "c8", "c16", "G", ">i4", ">f8", ">c16", "S5", "U3", "V7",
    "M8[ns]", "M8[D]", "m8[us]",
    "i4,f8", [("a", "u1"), ("b", "M8[s]")], [("a", "f4", (2, 3)), ("b", "S3")],
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def handle():
    """A handle of the default engine: memory is the same for all of them."""
    with nvmeio.Handle() as handle:
        yield handle


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data"


def random_array(dtype, shape):
    """Return an array of random bytes, so that every bit counts."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(np.random.default_rng(7).bytes(size), dtype).reshape(shape).copy()


def raw(base):
    """View a contiguous array as its bytes."""
    return base.reshape(-1).view(np.uint8)


def writable_sources(content):
    """Return one writable object of each exporting type, holding ``content``."""
    mapped = mmap.mmap(-1, len(content))
    mapped[:] = content
    return {
        "bytearray": bytearray(content),
        "memoryview": memoryview(bytearray(content)),
        "mmap": mapped,
        "array.array": array.array("H", content),
        "ctypes array": (ctypes.c_uint32 * (len(content) // 4)).from_buffer_copy(content),
        "ndarray": np.frombuffer(bytearray(content), np.uint8),
    }


CONTENT = bytes(range(256)) * 8
KINDS = list(writable_sources(CONTENT))


@pytest.mark.parametrize("kind", KINDS)
def test_exporters_of_the_buffer_protocol_are_written(handle, path, kind):
    source = writable_sources(CONTENT)[kind]
    assert handle.submit_write(source, path).wait() == len(CONTENT)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("kind", KINDS)
def test_exporters_of_the_buffer_protocol_are_filled(handle, path, kind):
    path.write_bytes(CONTENT)
    target = writable_sources(bytes(len(CONTENT)))[kind]
    assert handle.submit_read(target, path).wait() == len(CONTENT)
    assert bytes(memoryview(target).cast("B")) == CONTENT


@pytest.mark.parametrize(
    "source",
    [CONTENT, memoryview(CONTENT), np.frombuffer(CONTENT, np.uint8), np.float64(0.1)],
    ids=["bytes", "memoryview", "ndarray", "numpy scalar"],
)
def test_read_only_memory_can_be_written_to_a_file(handle, path, source):
    handle.submit_write(source, path).wait()
    assert path.read_bytes() == bytes(source)


@pytest.mark.parametrize(
    "target",
    [
        CONTENT,
        memoryview(CONTENT),
        np.frombuffer(CONTENT, np.uint8),
        np.broadcast_to(np.zeros(1), (256,)),
        np.frombuffer(CONTENT, "M8[s]"),
        mmap.mmap(-1, len(CONTENT), access=mmap.ACCESS_READ),
    ],
    ids=["bytes", "memoryview", "ndarray", "broadcast", "datetime64", "mmap"],
)
def test_read_into_read_only_memory_is_refused(handle, path, target):
    path.write_bytes(CONTENT)
    with pytest.raises(ValueError, match="read-only; pass writable memory"):
        handle.submit_read(target, path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_to_disk_and_back_bit_by_bit(handle, path, dtype):
    expected = random_array(dtype, (5, 7))
    before = routes(handle)
    handle.submit_write(expected, path).wait()
    assert path.read_bytes() == expected.tobytes()
    target = np.zeros_like(expected)
    handle.submit_read(target, path).wait()
    assert raw(target).tobytes() == raw(expected).tobytes()
    assert (routes(handle) - before).total() == 2 * expected.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_of_every_dtype_keep_their_bits(handle, path, dtype):
    expected = random_array(dtype, (6, 8))
    handle.submit_write(expected[::-2, 1::3], path).wait()
    order = raw(expected).reshape(6, 8, -1)[::-2, 1::3]
    assert path.read_bytes() == order.tobytes()
    target = np.zeros_like(expected)
    handle.submit_read(target[::-2, 1::3], path).wait()
    assert raw(target).reshape(6, 8, -1)[::-2, 1::3].tobytes() == order.tobytes()


LAYOUTS = {
    "contiguous": lambda base: base,
    "fortran": lambda base: base.T,
    "axes swapped": lambda base: base.swapaxes(0, 1),
    "reversed": lambda base: base[::-1, ::-1, ::-1],
    "one element": lambda base: base[1, 2, 3],
    "0-d": lambda base: base[1, 2, 3, ...],
    "column": lambda base: base[:, :, 1],
    "rows": lambda base: base[1:3],
    "no element": lambda base: base[:, 2:2],
    "axis of one": lambda base: base[:, 1:2, ::2],
    "new axis": lambda base: base[:, None, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_of_a_view_is_in_c_order(handle, path, layout):
    view = LAYOUTS[layout](np.arange(4 * 5 * 6).reshape(4, 5, 6))
    assert handle.submit_write(view, path).wait() == view.nbytes
    assert path.read_bytes() == view.tobytes()


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"one element"}))
def test_a_read_into_a_view_changes_nothing_else(handle, path, layout):
    base = np.full((4, 5, 6), -1)
    view = LAYOUTS[layout](base)
    content = np.arange(view.size).reshape(view.shape)
    path.write_bytes(content.tobytes())
    expected = base.copy()
    LAYOUTS[layout](expected)[...] = content
    assert handle.submit_read(view, path).wait() == view.nbytes
    np.testing.assert_array_equal(base, expected)


slices = st.builds(
    slice,
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-3, 3).filter(bool),
)


@given(data=st.data())
def test_any_basic_view_survives_the_round_trip(handle, tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4), label="shape")
    axes = data.draw(st.permutations(range(len(shape))), label="axes")
    index = tuple(data.draw(slices, label="index") for _ in shape)
    path = tmp_path_factory.mktemp("view") / "data"
    source = random_array("u2", shape)
    handle.submit_write(source.transpose(axes)[index], path).wait()
    assert path.read_bytes() == source.transpose(axes)[index].tobytes()
    target, expected = np.zeros_like(source), np.zeros_like(source)
    expected.transpose(axes)[index] = source.transpose(axes)[index]
    handle.submit_read(target.transpose(axes)[index], path).wait()
    np.testing.assert_array_equal(target, expected)


def test_write_of_broadcast_memory_repeats_it(handle, path):
    source = np.broadcast_to(np.arange(3, dtype=np.int16)[:, None], (3, 1000))
    assert handle.submit_write(source, path).wait() == 6000
    assert path.read_bytes() == source.tobytes()


@pytest.mark.parametrize(
    "target",
    [
        as_strided(np.zeros(10), (4, 5), (8, 0)),
        as_strided(np.zeros(10), (3, 2), (8, 8)),
        as_strided(np.zeros(10, "u2"), (4,), (1,)),
        sliding_window_view(np.zeros(10), 3, writeable=True),
    ],
    ids=["stride 0", "equal strides", "stride below the item", "windows"],
)
def test_read_into_overlapping_elements_is_refused(handle, path, target):
    path.write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="elements overlap"):
        handle.submit_read(target, path)


@pytest.mark.parametrize(
    "source",
    [
        np.array([1, "a"], dtype=object),
        np.zeros(3, dtype=[("a", "i4"), ("b", "O")]),
        memoryview(np.array([1, "a"], dtype=object)),
        (ctypes.py_object * 2)(1, 2),
    ],
    ids=["ndarray", "structured", "memoryview", "ctypes"],
)
@pytest.mark.parametrize("operation", ["submit_read", "submit_write"])
def test_python_objects_are_refused(handle, path, source, operation):
    path.write_bytes(bytes(4096))
    with pytest.raises(TypeError, match="Python objects"):
        getattr(handle, operation)(source, path)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy before 2.0")
def test_numpy_strings_of_variable_length_are_refused(handle, path):
    source = np.array(["a", "b" * 40], dtype=np.dtypes.StringDType())
    with pytest.raises(TypeError, match="Python objects"):
        handle.submit_write(source, path)


def test_a_field_named_o_does_not_count_as_an_object(handle, path):
    class Point(ctypes.Structure):
        _fields_ = [("O", ctypes.c_int32), ("XO", ctypes.c_double)]

    points = (Point * 3)(Point(1, 2.0), Point(3, 4.0), Point(5, 6.0))
    handle.submit_write(points, path).wait()
    assert path.read_bytes() == bytes(points)


@pytest.mark.parametrize(
    "source",
    [3, None, [1, 2], object(), io.BytesIO(b"12")],
    ids=lambda source: type(source).__name__,
)
@pytest.mark.parametrize("operation", ["submit_read", "submit_write"])
def test_other_objects_are_refused_by_name(handle, path, source, operation):
    path.write_bytes(bytes(4096))
    with pytest.raises(TypeError, match=f"not .*{type(source).__name__}") as raised:
        getattr(handle, operation)(source, path)
    # The message suggests no copy, because bytes read into a copy would be lost.
    assert "asarray" not in str(raised.value)
    if isinstance(source, io.BytesIO):
        assert "pass its getbuffer()" in str(raised.value)
        getattr(handle, operation)(source.getbuffer(), path).wait()


def test_the_message_about_a_storage_names_a_remedy(handle, path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(1000, dtype=torch.int32)
    storage = tensor.untyped_storage()
    with pytest.raises(TypeError, match=r"UntypedStorage; pass torch\.") as raised:
        handle.submit_write(storage, path)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert str(raised.value).endswith("torch.empty(0, dtype=torch.uint8).set_(storage)")
    assert handle.submit_write(memory, path).wait() == 4000
    assert path.read_bytes() == tensor.numpy().tobytes()
    tensor.zero_()
    handle.submit_read(memory, path).wait()
    assert tensor.tolist() == list(range(1000))


def test_masked_arrays_are_refused_because_the_mask_would_be_lost(handle, path):
    masked = np.ma.masked_less(np.arange(10), 5)
    with pytest.raises(TypeError, match=r"filled\(\)"):
        handle.submit_write(masked, path)
    handle.submit_write(masked.filled(-1), path).wait()
    assert path.read_bytes() == masked.filled(-1).tobytes()


def test_a_released_memoryview_is_refused(handle, path):
    source = memoryview(CONTENT)
    source.release()
    with pytest.raises(ValueError, match="released"):
        handle.submit_write(source, path)


def test_subclasses_of_ndarray_are_arrays(handle, path, tmp_path):
    mapped = np.memmap(tmp_path / "map", dtype="f4", mode="w+", shape=(16, 16))
    expected = random_array("u4", (16, 16)).view("f4")
    path.write_bytes(expected.tobytes())
    handle.submit_read(mapped, path).wait()
    mapped.flush()
    assert (tmp_path / "map").read_bytes() == expected.tobytes()
    records = np.rec.array([(1, 2.5), (3, 4.5)], dtype=[("n", "i4"), ("x", "f8")])
    handle.submit_write(records, tmp_path / "records").wait()
    assert (tmp_path / "records").read_bytes() == records.tobytes()


@pytest.mark.parametrize("view", [np.s_[:], np.s_[::2]], ids=["whole", "strided"])
@pytest.mark.parametrize("operation", ["submit_read", "submit_write"])
def test_memory_lives_until_the_request_releases_it(handle, path, operation, view):
    path.write_bytes(CONTENT)
    source = np.zeros(256)
    alive = weakref.ref(source)
    request = getattr(handle, operation)(source[view], path)
    del source
    gc.collect()
    assert alive() is not None
    request.wait()
    gc.collect()
    assert alive() is None


def test_a_cycle_of_array_and_request_is_collected(handle, path):
    class Tagged(np.ndarray):
        pass

    source = np.arange(1 << 16).view(Tagged)
    expected = source.tobytes()
    alive = weakref.ref(source)
    source.request = handle.submit_write(source, path)
    del source
    gc.collect()
    source = alive()
    if source is not None:
        source.request.wait()
    del source
    gc.collect()
    handle.submit_fsync(path).wait()
    assert path.read_bytes() == expected


def test_a_buffer_cannot_be_constructed():
    with pytest.raises(TypeError, match="is made when"):
        Buffer()


def offsets(shape, strides):
    """Return the offset of every element."""
    grid = np.indices(shape).reshape(len(shape), -1)
    return np.asarray(strides) @ grid


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-20, 20)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_overlap_is_never_missed(axes, item):
    shape, strides = zip(*axes, strict=True)
    touched = (offsets(shape, strides)[:, None] + np.arange(item)).ravel()
    if len(np.unique(touched)) < len(touched):
        assert may_overlap(shape, strides, item)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_views_of_one_array_are_not_taken_for_overlapping(shape, item, data):
    base = np.zeros(shape, f"V{item}")
    view = base[tuple(data.draw(slices) for _ in shape)]
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    if view.size:
        assert not may_overlap(view.shape, view.strides, item)
