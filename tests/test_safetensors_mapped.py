"""Model files that are mapped instead of read."""

import gc
import importlib
import json
import struct

import numpy as np
import pytest

pytest.importorskip("torch")

import safetensors.torch

import nvmeio.safetensors.numpy
import nvmeio.safetensors.torch
from helpers import (
    MIB,
    PAGE,
    call_in_child,
    is_mapped,
    left_open,
    need_direct,
    need_ml_dtypes,
    warm,
)
from model_samples import (
    NUMPY_DTYPES,
    TORCH_DTYPES,
    Moved,
    bits_of,
    bits_of_all,
    filled,
    torch,
)
from nvmeio.safetensors import load_sharded, safe_open

S = np.s_
SHAPES = [(), (3,), (0, 3), (5, 8), (64, 200)]
DTYPES = {"pt": TORCH_DTYPES, "np": NUMPY_DTYPES}
LOAD = {
    "pt": nvmeio.safetensors.torch.load_file,
    "np": nvmeio.safetensors.numpy.load_file,
}


def in_opened(read):
    """Return a function that reads from a mapped file."""

    def way(path, framework):
        with safe_open(path, framework, mapped=True) as file:
            return read(file)

    return way


WAYS = {
    "load_file": lambda path, framework: LOAD[framework](path, mapped=True),
    "load_sharded": lambda path, framework: load_sharded(
        path, framework=framework, mapped=True
    ),
    "get_tensor": in_opened(
        lambda file: {n: file.get_tensor(n) for n in file.offset_keys()}
    ),
    "get_tensors": in_opened(lambda file: file.get_tensors()),
    "get_many": in_opened(lambda file: file.get_many(dict.fromkeys(file.keys()))),
}


def save(path, dtypes=TORCH_DTYPES, shapes=SHAPES):
    """Save a tensor of each dtype and shape; return them."""
    # Pairs of 4 bits have no shape without dimensions.
    tensors = {
        f"{dtype} {shape}": filled(dtype, shape)
        for dtype in dtypes
        for shape in shapes
        if shape or not dtype.startswith("float4")
    }
    safetensors.torch.save_file(tensors, path)
    return tensors


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("way", WAYS)
def test_all_dtypes_and_shapes_are_mapped(path, way, framework):
    tensors = save(path, DTYPES[framework])
    if framework == "np":
        tensors = {name: tensor.numpy() for name, tensor in tensors.items()}
    moved = Moved()
    found = WAYS[way](path, framework)
    assert moved.buffered == moved.direct == 0
    expected = sorted(bits_of_all(tensors), key=lambda each: each[0])
    assert sorted(bits_of_all(found), key=lambda each: each[0]) == expected
    for tensor in found.values():
        size = tensor.size if framework == "np" else tensor.numel()
        assert not size or is_mapped(tensor, path)
        if framework == "pt":
            assert tensor.untyped_storage().nbytes() == size * tensor.itemsize


@need_ml_dtypes
def test_bfloat16_of_numpy_is_mapped(path):
    call_in_child(check_bfloat16, path)


def check_bfloat16(path):
    importlib.import_module("ml_dtypes")
    tensors = save(path, ["bfloat16"])
    for name, array in LOAD["np"](path, mapped=True).items():
        assert array.tobytes() == bits_of(tensors[name])[2]
        assert not array.size or is_mapped(array, path)


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_without_data_has_no_map(path, way, framework):
    tensors = save(path, ["float32"], [(0, 3), (4, 0)])
    found = WAYS[way](path, framework)
    assert {n: t.shape for n, t in found.items()} == {
        n: t.shape for n, t in tensors.items()
    }


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_what_is_written_to_mapped_tensors_stays_in_the_process(path, framework):
    save(path, ["float32"], [(3000,)])
    before = path.read_bytes()
    (tensor,) = LOAD[framework](path, mapped=True).values()
    tensor[...] = 7
    (again,) = LOAD[framework](path, mapped=True).values()
    assert (tensor == 7).all()
    assert not (again == 7).any()
    assert path.read_bytes() == before


def test_tensors_of_one_open_file_share_its_map(path):
    """As with safetensors."""
    save(path, ["float32"], [(30, 20)])
    with safe_open(path, "pt", mapped=True) as file:
        (name,) = file.keys()
        file.get_tensor(name)[3] = 7
        assert (file.get_tensor(name)[3] == 7).all()
        assert (file.get_slice(name)[3] == 7).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_map_ends_with_its_last_tensor_and_keeps_no_descriptor(path, way, framework):
    tensors = save(path, ["int64"], [(3,), (5, 8), (64, 200)])
    found = WAYS[way](path, framework)
    gc.collect()
    assert left_open(path.parent) == []
    path.unlink()
    name, last = found.popitem()
    found.clear()
    gc.collect()
    assert bits_of(torch.as_tensor(last)) == bits_of(tensors[name])
    place = f"{path} (deleted)"
    assert is_mapped(last, place)
    del last
    gc.collect()
    with open("/proc/self/maps") as file:
        assert place not in file.read()


def save_misaligned(path):
    """Save a file that safetensors would not write: `odd` begins at an odd offset."""
    header = json.dumps(
        {
            "bytes": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "odd": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    values = struct.pack("<Q", len(header)) + header + b"abc" + struct.pack("<2f", 1, 2)
    path.write_bytes(values)


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("way", WAYS)
def test_misaligned_tensors_are_read(path, way, framework):
    save_misaligned(path)
    found = WAYS[way](path, framework)
    assert list(found) == ["bytes", "odd"]
    assert found["odd"].tolist() == [1, 2]
    assert is_mapped(found["bytes"], path)
    assert not is_mapped(found["odd"], path)


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_parts_in_one_run_are_mapped(path, framework):
    save(path, ["float32"], [(64, 200)])
    (whole,) = LOAD[framework](path).values()
    with safe_open(path, framework, mapped=True) as file:
        (name,) = file.keys()
        for index, mapped in [
            (S[10:20], True),
            (S[7], True),
            (S[7, 50:60], True),
            (S[:], True),
            (S[5:5], False),
            (S[:, 3:9], False),
            (S[::2], False),
        ]:
            for part in (
                file.get_slice(name)[index],
                file.get_many({name: index})[name],
                load_sharded(path, slices={name: index}, framework=framework, mapped=True)[
                    name
                ],
            ):
                assert bits_of(part) == bits_of(whole[index])
                assert is_mapped(part, path) == mapped


def test_some_names_of_several_files(tmp_path):
    tensors = {f"{n}": torch.arange(n, n + 1000) for n in range(6)}
    nvmeio.safetensors.save_sharded(tensors, tmp_path, 16000)
    found = load_sharded(tmp_path, names=["4", "1"], mapped=True)
    assert {n: bits_of(t) for n, t in found.items()} == {
        n: bits_of(tensors[n]) for n in ("4", "1")
    }
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, tensor in found.items():
        assert is_mapped(tensor, tmp_path / places["weight_map"][name])


def test_progress_counts_mapped_bytes(path):
    save_misaligned(path)
    seen = []
    LOAD["pt"](path, mapped=True, progress=lambda *counts: seen.append(counts))
    assert seen == [(3, 11), (11, 11)]


def test_tensors_on_a_device_are_copied_from_the_map(path):
    tensors = save(path, ["bfloat16", "float32"])
    moved = Moved()
    with safe_open(path, "pt", mapped=True) as file:
        file._framework.on_host, file._framework.device = False, torch.device("meta")
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.device.type, found.dtype) == ("meta", tensor.dtype)
            assert found.shape == tensor.shape
    assert moved.buffered == moved.direct == 0


def test_a_model_is_loaded_from_a_map(path):
    model, other = torch.nn.Linear(40, 20), torch.nn.Linear(40, 20)
    nvmeio.safetensors.torch.save_model(model, path)
    moved = Moved()
    nvmeio.safetensors.torch.load_model(other, path, mapped=True)
    assert moved.buffered == moved.direct == 0
    assert torch.equal(model.weight, other.weight)
    assert not is_mapped(other.weight, path)


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("way", ["load_file", "load_sharded", "get_tensor"])
def test_by_default_tensors_have_memory_of_their_own(path, way, framework):
    """Also those of a cached file: a change of the file does not reach them."""
    tensors = save(path, ["int64"], [(3,), (5000,)])
    warm(path)
    if way == "load_file":
        found = LOAD[framework](path)
    elif way == "load_sharded":
        found = load_sharded(path, framework=framework)
    else:
        with safe_open(path, framework) as file:
            found = {name: file.get_tensor(name) for name in tensors}
    path.write_bytes(bytes(path.stat().st_size))
    for name, tensor in tensors.items():
        assert bits_of(torch.as_tensor(found[name])) == bits_of(tensor)


@pytest.mark.parametrize("part", [0, MIB, None])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_auto_maps_what_is_cached_whole(path, part, framework):
    need_direct(path.parent)
    tensors = save(path, ["int64"], [(MIB // 4,)])
    warm(path, part)
    moved = Moved()
    found = LOAD[framework](path, mapped="auto")
    for name, tensor in found.items():
        assert is_mapped(tensor, path) == (part is None)
        assert bits_of(torch.as_tensor(tensor)) == bits_of(tensors[name])
    assert (moved.buffered + moved.direct == 0) == (part is None)


@pytest.mark.parametrize("options", [{"direct": True}, {"out": {}}])
def test_auto_maps_nothing_that_must_be_read(path, options):
    need_direct(path.parent)
    (name,) = save(path, ["int64"], [(PAGE,)])
    warm(path)
    if "out" in options:
        options = {"out": {name: torch.empty(PAGE, dtype=torch.int64)}}
    found = LOAD["pt"](path, mapped="auto", **options)
    assert not is_mapped(found[name], path)


@pytest.mark.parametrize("call", [LOAD["pt"], LOAD["np"], load_sharded, safe_open])
def test_what_contradicts_a_map_is_refused(path, call):
    save(path, ["int64"])
    arguments = (path, "pt") if call is safe_open else (path,)
    with pytest.raises(ValueError, match="mapped is True, but direct is True"):
        call(*arguments, mapped=True, direct=True)
    if call is not safe_open:
        with pytest.raises(ValueError, match="mapped is True, but out has tensors"):
            call(*arguments, mapped=True, out={})
    for value, kind in [("yes", ValueError), (2, ValueError), (None, TypeError)]:
        with pytest.raises(kind, match=r"mapped is .*; it must be 'auto', True or False"):
            call(*arguments, mapped=value)
