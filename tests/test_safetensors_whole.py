"""Whole model files: results and errors equal those of the safetensors package."""

import os
import re

import numpy as np
import pytest

pytest.importorskip("torch")

import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import nvmeio.safetensors
import nvmeio.safetensors.numpy
import nvmeio.safetensors.torch
from helpers import MIB
from model_samples import NUMPY_DTYPES, TORCH_DTYPES, bits_of, bits_of_all, filled, outcome

THEIRS = {"pt": safetensors.torch, "np": safetensors.numpy}
OURS = {"pt": nvmeio.safetensors.torch, "np": nvmeio.safetensors.numpy}
SHAPES = [(), (0,), (1,), (3, 0, 2), (3, 2), (1, 1, 5, 2), (129, 64)]

# Differences from safetensors 0.8.0, with the reason.
DIFFERENCES = """
a missing file                the words of FileNotFoundError are Python's, with errno
what cannot be read           OSError, not SafetensorError "I/O error"; EISDIR, not ENODEV
complex128, bits8, int4       SafetensorError as for numpy, not KeyError
the mode of a new file        0666 less the umask, not 0600
numpy, not in C order         saved in C order; theirs saves the memory as it lies
an odd header                 a name or a key twice, whitespace before it, and entries and
                              dtypes in serde's other forms are refused
conj() and imag               resolved; theirs saves the memory that they are views of
F4 and F8_E8M0                load() reads them; theirs has a KeyError
a path of bytes               is a path; theirs has a TypeError
a scalar of numpy             is an array without dimensions; theirs wants an array
torch.device("cpu"), "cpu:0"  are devices; theirs wants "cpu"
a slice backwards             SafetensorError; theirs panics
"""


def tensors_of(kind):
    """Return tensors of every dtype and of many shapes."""
    if kind == "np":
        return {
            f"{dtype} {shape}": filled(dtype, shape).numpy()
            for dtype in NUMPY_DTYPES
            for shape in SHAPES
        }
    # F4 counts in pairs along the last dimension.
    return {
        f"{dtype} {shape}": filled(dtype, shape)
        for dtype in TORCH_DTYPES
        for shape in SHAPES
        if shape or "float4" not in dtype
    }


@pytest.fixture(params=["pt", "np"])
def kind(request):
    """The framework."""
    return request.param


@pytest.fixture
def saved(kind, tmp_path):
    """A file that safetensors wrote, with all kinds of tensors."""
    path = tmp_path / "model.safetensors"
    THEIRS[kind].save_file(tensors_of(kind), path, {"format": kind})
    return path


def test_every_dtype_of_torch_is_tested():
    found = {
        name
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
        and not isinstance(
            outcome(safetensors.torch.save, {"a": torch.empty(2, dtype=value)}), tuple
        )
    }
    of_ours = {getattr(torch, name) for name in TORCH_DTYPES}
    assert {getattr(torch, name) for name in found} == of_ours


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("direct", ["auto", True, False])
def test_a_file_is_loaded_to_the_bit(kind, saved, default_engine, backend, direct):
    # safetensors cannot load F4 by pread.
    expected = THEIRS[kind].load_file(saved)
    found = OURS[kind].load_file(saved, backend=backend, direct=direct)
    assert bits_of_all(found) == bits_of_all(expected)


def test_bytes_are_loaded_to_the_bit(kind, saved):
    data = saved.read_bytes()
    found = OURS[kind].load(data)
    # safetensors cannot load two of the dtypes that it saves.
    newer = ("F4", "F8_E8M0")
    known = {
        name: view
        for name, view in safetensors.deserialize(data)
        if view["dtype"] not in newer
    }
    view_of = THEIRS[kind]._view2torch if kind == "pt" else THEIRS[kind]._view2np
    expected = view_of((name, known[name]) for name in found if name in known)
    assert bits_of_all({name: found[name] for name in expected}) == bits_of_all(expected)
    assert bits_of_all(found) == bits_of_all(OURS[kind].load_file(saved))
    # safetensors returns them in no order.
    assert dict(nvmeio.safetensors.deserialize(data)) == dict(safetensors.deserialize(data))


def test_bytes_are_loaded_to_the_cpu_whatever_the_default_device():
    tensors = {"a": torch.ones(3), "none": torch.ones(0, 4)}
    with torch.device("meta"):
        found = nvmeio.safetensors.torch.load(nvmeio.safetensors.torch.save(tensors))
    assert {name: each.device.type for name, each in found.items()} == {
        "a": "cpu",
        "none": "cpu",
    }


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"a": 'ä\n"\\\u2028'}])
def test_saved_files_equal_theirs_to_the_byte(kind, tmp_path, metadata):
    tensors = tensors_of(kind)
    expected = THEIRS[kind].save(tensors, metadata)
    assert OURS[kind].save(tensors, metadata) == expected
    OURS[kind].save_file(tensors, tmp_path / "ours", metadata)
    assert (tmp_path / "ours").read_bytes() == expected
    THEIRS[kind].save_file(tensors, tmp_path / "theirs", metadata)
    assert (tmp_path / "theirs").read_bytes() == expected


SPARSE = torch.ones(3).to_sparse()
BASE = torch.arange(24.0).reshape(2, 3, 4)
REFUSED_BY_TORCH = {
    "list": [BASE],
    "none": None,
    "number": {"a": 1},
    "array": {"a": np.ones(3)},
    "sparse": {"a": SPARSE, "b": BASE, "c": SPARSE},
    "transposed": {"a": BASE.transpose(0, 1)},
    "strided": {"a": BASE[..., ::2]},
    "same": {"a": BASE, "b": BASE},
    "views": {"a": BASE[0], "b": BASE},
    "overlapping": {"a": BASE.view(-1)[:20], "b": BASE.view(-1)[10:]},
    "parameter": {"a": torch.nn.Parameter(BASE), "b": BASE},
    "another dtype": {"a": BASE.view(torch.int32), "b": BASE},
    "meta": {"a": torch.empty(3, device="meta")},
    "meta of none": {"a": torch.empty(0, device="meta")},
    "key": {1: BASE},
    "reserved": {"__metadata__": BASE},
    "surrogate": {"\ud800": BASE},
}


@pytest.mark.parametrize("tensors", REFUSED_BY_TORCH.values(), ids=REFUSED_BY_TORCH)
def test_tensors_that_theirs_refuses_are_refused(tensors, tmp_path):
    expected = outcome(safetensors.torch.save, tensors)
    if tensors is REFUSED_BY_TORCH["reserved"]:
        # safetensors writes a file that it cannot read.
        expected = "SafetensorError", ""
    found = outcome(OURS["pt"].save, tensors)
    assert found[0] == expected[0]
    # Both list the tensors that share memory.
    if "share memory" in expected[1]:
        names = [re.findall(r"'(\w)'", each[1]) for each in (found, expected)]
        assert sorted(names[0]) == sorted(names[1]) == ["a", "b"]
    assert outcome(OURS["pt"].save_file, tensors, tmp_path / "model") == found
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": BASE.view(-1)[:10], "b": BASE.view(-1)[10:]},
        {"a": BASE[0:0], "b": BASE},
        {"a": torch.ones(8)[::8]},
        {"a": torch.ones(8, 3)[::8]},
        {"a": torch.ones(1, 5).expand(1, 5)},
        {"a": torch.ones(2, 3, requires_grad=True) * 2},
        {"a": torch.nn.Parameter(torch.ones(3))},
        {"a": torch.ones(2, 1, 3).transpose(0, 1).contiguous(), "b": torch.ones(())},
    ],
    ids=["beside", "empty", "one", "one row", "expanded", "grad", "parameter", "moved"],
)
def test_tensors_that_theirs_accepts_are_accepted(tensors):
    assert OURS["pt"].save(tensors) == safetensors.torch.save(tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        *([np.ones(3)], None, {"a": [1]}, {1: np.ones(3)}, {"a": np.ones(2, complex)}),
        *({"a": np.array(["x"])}, {"a": np.array([object()])}),
        *({"a": np.array(["2026"], "M8[s]")}, {"a": np.ones(2, "f4,i2")}),
        {"a": np.ones(2, np.longdouble)},
    ],
    ids=lambda tensors: re.sub(r"0x\w+", "", str(tensors)),
)
def test_arrays_that_theirs_refuses_are_refused(tensors):
    expected = outcome(safetensors.numpy.save, tensors)
    assert isinstance(expected, tuple)
    assert outcome(OURS["np"].save, tensors)[0] == expected[0]


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": None}, [("a", "b")], "a", 1]
)
def test_metadata_other_than_text_is_refused(kind, metadata, tmp_path):
    expected = outcome(THEIRS[kind].save, {}, metadata)
    assert isinstance(expected, tuple)
    assert outcome(OURS[kind].save, {}, metadata)[0] == expected[0]
    assert outcome(OURS[kind].save_file, {}, tmp_path / "a", metadata)[0] == expected[0]


class TestDifferences:
    """A test for each line of DIFFERENCES; test_safetensors_header.py has the header's."""

    def test_a_missing_file(self, kind, tmp_path):
        path = tmp_path / "missing"
        with pytest.raises(
            FileNotFoundError,
            match=re.escape(f"[Errno 2] No such file or directory: '{path}'"),
        ):
            OURS[kind].load_file(path)
        assert outcome(THEIRS[kind].load_file, path)[0] == "FileNotFoundError"

    def test_an_unreadable_file(self, kind, tmp_path):
        with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
            OURS[kind].load_file(tmp_path)
        assert outcome(THEIRS[kind].load_file, tmp_path)[0] == "OSError"
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match="it is a pipe"):
            OURS[kind].load_file(tmp_path / "pipe")

    @pytest.mark.parametrize("dtype", ["complex128", "bits8", "int4", "complex32"])
    def test_dtypes_of_torch_that_the_format_lacks(self, dtype):
        tensors = {"a": torch.empty(2, dtype=getattr(torch, dtype))}
        with pytest.raises(nvmeio.safetensors.SafetensorError, match=f'"{dtype}"'):
            OURS["pt"].save(tensors)
        assert outcome(THEIRS["pt"].save, tensors)[0] == "KeyError"

    @pytest.mark.parametrize(
        "strides",
        ["transposed", "blocks of columns", "reversed", "every other", "big endian"],
    )
    def test_numpy_not_in_c_order(self, strides):
        base = filled("float32", (6, 8)).numpy()
        array = {
            "transposed": base.T,
            "blocks of columns": filled("float32", (150, 3, 5)).numpy().transpose(2, 1, 0),
            "reversed": base[::-1, ::-1],
            "every other": base[::2, 1::3],
            "big endian": base.astype(">f4"),
        }[strides]
        found = safetensors.numpy.load(OURS["np"].save({"a": array}))["a"]
        assert np.array_equal(found.view("u4"), array.astype("<f4").view("u4"))
        assert found.shape == array.shape

    def test_a_scalar_of_numpy(self):
        found = safetensors.numpy.load(OURS["np"].save({"a": np.float32(2.5)}))["a"]
        assert (found.shape, found) == ((), 2.5)
        assert outcome(THEIRS["np"].save, {"a": np.float32(2.5)})[0] == "AttributeError"

    def test_conj_and_imag(self):
        base = filled("complex64", (5,))
        for tensor in (base.conj(), base.conj().imag.contiguous(), base[:1].conj().imag):
            found = safetensors.torch.load(OURS["pt"].save({"a": tensor}))["a"]
            assert bits_of(found) == bits_of(tensor.resolve_conj().resolve_neg())

    def test_f4_and_e8m0(self):
        tensors = {name: filled(name, (4,)) for name in TORCH_DTYPES[-2:]}
        data = safetensors.torch.save(tensors)
        assert outcome(safetensors.torch.load, data)[0] == "KeyError"
        found = OURS["pt"].load(data)
        assert {n: bits_of(t) for n, t in found.items()} == {
            name: bits_of(tensor) for name, tensor in tensors.items()
        }

    def test_paths_of_bytes_and_devices(self, saved, kind):
        expected = bits_of_all(THEIRS[kind].load_file(saved))
        assert bits_of_all(OURS[kind].load_file(os.fsencode(saved))) == expected
        if kind == "pt":
            for device in ("cpu", "cpu:0", torch.device("cpu"), None):
                assert bits_of_all(OURS[kind].load_file(saved, device)) == expected


@pytest.mark.parametrize("damage", ["empty", "short", "cut", "longer", "text", "huge"])
def test_invalid_files_are_refused_with_their_messages(kind, saved, damage):
    data = saved.read_bytes()
    saved.write_bytes(
        {
            "empty": b"",
            "short": data[:7],
            "cut": data[:-1],
            "longer": data + b"\0",
            "text": b"some text that is long enough",
            "huge": (2**63).to_bytes(8, "little") + data[8:],
        }[damage]
    )
    expected = outcome(THEIRS[kind].load_file, saved)
    assert expected[0] == "SafetensorError"
    assert outcome(OURS[kind].load_file, saved) == expected
    assert outcome(OURS[kind].load, saved.read_bytes()) == outcome(
        THEIRS[kind].load, saved.read_bytes()
    )


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"backend": "x"},
            {"device": "nonsense"},
            {"device": "meta"},
        ),
        *({"framework": "xx"}, {"framework": None}, {"framework": 1}, {"filename": None}),
        {"filename": 3},
    ],
    ids=str,
)
def test_arguments_are_refused_as_theirs_are(saved, options):
    arguments = {"filename": saved, "framework": "pt", **options}
    expected = outcome(safetensors.safe_open, **arguments)
    found = outcome(nvmeio.safetensors.safe_open, **arguments)
    assert isinstance(expected, tuple)
    assert found[0] == expected[0]
    if options.get("filename", "") == "" and options.get("framework") != 1:
        assert found == expected


@pytest.mark.parametrize("direct", ["yes", 2, None, 1.5])
def test_direct_is_one_of_three(kind, saved, direct):
    with pytest.raises((ValueError, TypeError), match="direct"):
        OURS[kind].load_file(saved, direct=direct)


class TestNames:
    """Loading some of many tensors."""

    def test_tensors_are_returned_in_the_order_of_the_file(self, kind, saved):
        whole = OURS[kind].load_file(saved)
        names = list(whole)[::-3]
        found = OURS[kind].load_file(saved, names=iter([*names, names[0]]))
        expected = {name: whole[name] for name in whole if name in names}
        assert bits_of_all(found) == bits_of_all(expected)
        assert OURS[kind].load_file(saved, names=[]) == {}

    def test_a_missing_tensor_is_named(self, kind, saved):
        with pytest.raises(
            nvmeio.safetensors.SafetensorError, match="does not contain tensor none"
        ):
            OURS[kind].load_file(saved, names=["float32 ()", "none"])
        for names in ("none", 5):
            with pytest.raises(TypeError, match="iterable of names"):
                OURS[kind].load_file(saved, names=names)
        with pytest.raises(TypeError, match="out is of type list; it must be a dict"):
            OURS[kind].load_file(saved, out=[])


class TestProgress:
    """The progress function, which gets the bytes read or written so far."""

    @pytest.fixture
    def large(self, tmp_path):
        tensors = {f"{n:03}": filled("uint8", (MIB + n,), n).numpy() for n in range(70)}
        safetensors.numpy.save_file(tensors, tmp_path / "large")
        return tmp_path / "large", tensors

    @pytest.mark.parametrize("way", ["memory", "out"])
    def test_progress_rises_to_the_total(self, kind, large, default_engine, way):
        path, tensors = large
        options = {}
        if way == "out":
            options["out"] = {name: np.empty_like(array) for name, array in tensors.items()}
            if kind == "pt":
                options["out"] = {n: torch.from_numpy(a) for n, a in options["out"].items()}
        told = []
        OURS[kind].load_file(path, progress=lambda *pair: told.append(pair), **options)
        done = [done for done, _ in told]
        total = sum(array.nbytes for array in tensors.values())
        assert done == sorted(set(done))
        assert done[-1] == total
        assert {of for _, of in told} == {total}
        if way == "memory":
            assert len(told) >= 3

    def test_an_error_of_progress_leaves_nothing_in_flight(
        self, kind, large, default_engine
    ):
        path, tensors = large

        def fail(done, total):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            OURS[kind].load_file(path, progress=fail, direct="auto")
        assert nvmeio.default_handle().pending == 0
        out = {name: np.zeros_like(array) for name, array in tensors.items()}
        with pytest.raises(KeyError, match="mine"):
            OURS["np"].load_file(path, progress=fail, out=out)
        assert nvmeio.default_handle().pending == 0

    def test_progress_of_a_save_rises_to_the_size_of_the_file(self, kind, large, tmp_path):
        _, tensors = large
        if kind == "pt":
            tensors = {name: torch.from_numpy(array) for name, array in tensors.items()}
        told = []
        OURS[kind].save_file(tensors, tmp_path / "b", progress=lambda *p: told.append(p))
        size = (tmp_path / "b").stat().st_size
        assert [done for done, _ in told] == sorted({done for done, _ in told})
        assert told[-1] == (size, size)


class TestOut:
    """Tensors that the caller passes to be filled."""

    @pytest.mark.parametrize("strided", [False, True])
    def test_targets_with_any_strides_are_filled(
        self, kind, saved, default_engine, strided
    ):
        expected = THEIRS[kind].load_file(saved)
        out = {}
        for name, tensor in expected.items():
            shape = tuple(tensor.shape)
            if strided and shape and "float4" not in name:
                shape = (*shape[:-1], 2 * shape[-1])
            empty = np.zeros if kind == "np" else torch.empty
            made = empty(shape, dtype=tensor.dtype)
            out[name] = made if shape == tuple(tensor.shape) else made[..., ::2]
        found = OURS[kind].load_file(saved, out=out)
        assert bits_of_all(found) == bits_of_all(expected)
        assert bits_of_all(out) == bits_of_all(expected)

    def test_the_data_of_a_parameter_are_filled(self, saved):
        shape = (129, 64)
        out = {f"float32 {shape}": torch.nn.Parameter(torch.zeros(shape))}
        OURS["pt"].load_file(saved, out=out)
        (name, found) = out.popitem()
        assert bits_of(found.detach()) == bits_of(THEIRS["pt"].load_file(saved)[name])
        assert found.requires_grad

    def test_only_the_tensors_of_the_targets_are_read(self, kind, saved):
        name = "int32 (3, 2)"
        out = {name: THEIRS[kind].load_file(saved)[name] * 0}
        assert list(OURS[kind].load_file(saved, out=out)) == [name]
        assert bits_of(out[name]) == bits_of(THEIRS[kind].load_file(saved)[name])

    @pytest.mark.parametrize(
        "wrong", ["dtype", "shape", "missing", "no tensor", "expanded", "unknown"]
    )
    def test_targets_that_do_not_fit_are_refused_before_a_read(self, kind, saved, wrong):
        first, name = "float64 (129, 64)", "int32 (3, 2)"
        whole = THEIRS[kind].load_file(saved)
        out = {first: whole[first] * 0, name: whole[name] * 0}
        names = [first, name]
        if wrong == "dtype":
            out[name] = whole["uint32 (3, 2)"]
        elif wrong == "shape":
            out[name] = out[name].reshape(2, 3)
        elif wrong == "missing":
            del out[name]
        elif wrong == "no tensor":
            out[name] = [[1, 2]] * 3
        elif wrong == "expanded":
            out[name] = out[name][:1]
            if kind == "np":
                out[name] = np.lib.stride_tricks.as_strided(out[name], (3, 2), (0, 4))
            else:
                out[name] = out[name].expand(3, 2)
        else:
            out["none"], names = out[name], None
        error = {"no tensor": TypeError, "unknown": nvmeio.safetensors.SafetensorError}
        before = bits_of(out[first])
        with pytest.raises(
            error.get(wrong, ValueError),
            match=re.escape(name) if wrong != "unknown" else "none",
        ):
            OURS[kind].load_file(saved, names=names, out=out)
        assert bits_of(out[first]) == before
