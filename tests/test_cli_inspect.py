"""``nvmeio inspect`` lists the contents of files."""

import gzip
import io
import json
import os
import pathlib
import pickle
import re
import zipfile

import numpy as np
import pytest

import nvmeio
import nvmeio.safetensors.numpy as st
from commands import call_nvmeio, listed
from helpers import POINTER
from nvmeio._cli import main, torch_files
from nvmeio.checkpoint import Checkpointer
from nvmeio.safetensors import SafetensorError, load_sharded, save_sharded

TENSORS = {"weight": np.zeros((4, 1024), np.float32), "bias": np.zeros(3, np.int16)}


def test_the_tensors_of_a_model_file_are_listed(tmp_path):
    path = tmp_path / "model.safetensors"
    st.save_file(TENSORS, path, {"format": "np"}, align=4096)
    found = call_nvmeio("inspect", path)
    assert found.status == 0
    lines = found.out.splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "size", "offset"]
    assert lines[1].split() == ["weight", "F32", "4", "x", "1024", "16", "KiB", "4096"]
    assert lines[2].split() == ["bias", "I16", "3", "6", "B", str(4096 + 16384)]
    assert "format: np" in lines
    assert lines[-1] == "safetensors: 2 tensors, 16 KiB; 2 at multiples of 4096"


def test_json_has_exact_values(tmp_path):
    path = tmp_path / "model.safetensors"
    st.save_file(TENSORS, path)
    found = json.loads(call_nvmeio("inspect", path, "--json").out)
    names = [tensor["name"] for tensor in found["tensors"]]
    with st.safe_open(path, "np") as file:
        assert names == file.offset_keys()
    data = path.read_bytes()
    for tensor in found["tensors"]:
        begin = tensor["offset"]
        array = TENSORS[tensor["name"]]
        assert data[begin : begin + tensor["bytes"]] == array.tobytes()
        assert tensor["shape"] == list(array.shape)
    assert found["metadata"] is None


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_npy_file_is_one_tensor(tmp_path, order):
    path = tmp_path / "array.npy"
    np.save(path, np.zeros((3, 5), np.int32, order))
    found = json.loads(call_nvmeio("inspect", path, "--json").out)
    (tensor,) = found["tensors"]
    assert (tensor["dtype"], tensor["shape"], tensor["bytes"]) == ("int32", [3, 5], 60)
    assert tensor["offset"] == path.stat().st_size - 60
    assert found["metadata"]["order"] == {"C": "C", "F": "Fortran"}[order]


def test_an_unknown_file_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(bytes(range(1, 100)))
    found = call_nvmeio("inspect", path)
    assert (found.status, found.out) == (1, "")
    assert str(path) in found.err
    assert "neither a .npy file nor a model file" in found.err


def test_a_model_in_several_files_is_listed_with_the_file_of_each_tensor(tmp_path):
    sharded = tmp_path / "sharded"
    save_sharded(TENSORS, sharded, 10_000)
    index = sharded / "model.safetensors.index.json"
    for path in (sharded, index):
        found = json.loads(call_nvmeio("inspect", path, "--json").out)
        assert {each["name"]: each["files"] for each in found["tensors"]} == {
            name: [file]
            for name, file in json.loads(index.read_text())["weight_map"].items()
        }
    shown = call_nvmeio("inspect", sharded).out.splitlines()
    assert shown[0].split() == ["name", "dtype", "shape", "size", "files"]
    assert shown[-1].startswith("safetensors, in several files: 2 tensors, 16 KiB")
    index.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    found = call_nvmeio("inspect", sharded)
    assert "must be a file in the folder of the index" in found.err
    index.unlink()
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"")
    found = call_nvmeio("inspect", sharded)
    assert re.search("model-00001-of-00002.safetensors: .*it is empty", found.err)


@pytest.mark.parametrize("alignment", [64, 4096])
def test_a_torch_file_is_listed_without_running_code(tmp_path, alignment):
    torch = pytest.importorskip("torch")
    import nvmeio.torch as ours

    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = {
        "model": {"weight": weight, "rows": weight[1:], "half": weight.bfloat16()},
        "list": [
            torch.tensor([1, 2]),
            torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        ],
        "eight": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "unsigned": torch.tensor([7], dtype=torch.uint16),
        "epoch": 3,
        "opaque": pathlib.PurePosixPath("x"),
    }
    path = tmp_path / "state.pt"
    ours.save(state, path, storage_alignment=alignment)
    found = json.loads(call_nvmeio("inspect", path, "--json").out)
    tensors = {each["name"]: each for each in found["tensors"]}
    assert {name: each["dtype"] for name, each in tensors.items()} == {
        "model/weight": "float32",
        "model/rows": "float32",
        "model/half": "bfloat16",
        "list/0": "int64",
        "list/1": "float64",
        "eight": "float8_e4m3fn",
        "unsigned": "uint16",
    }
    data = path.read_bytes()
    rows = tensors["model/rows"]
    assert rows["shape"] == [2, 4]
    assert data[rows["offset"] :][: rows["bytes"]] == weight[1:].numpy().tobytes()
    assert tensors["list/0"]["bytes"] == 16


def test_code_in_a_pickle_is_not_run(tmp_path):
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"evil": Evil(), "x": torch.ones(1)}, tmp_path / "state.pt")
    found = json.loads(call_nvmeio("inspect", tmp_path / "state.pt", "--json").out)
    assert [each["name"] for each in found["tensors"]] == ["x"]
    assert not (tmp_path / "made").exists()


def test_a_torch_file_may_lack_checksums(tmp_path):
    torch = pytest.importorskip("torch")
    config = pytest.importorskip("torch.utils.serialization.config")
    with config.patch({"save.compute_crc32": False}):
        torch.save({"x": torch.ones(3)}, tmp_path / "state.pt")
    found = json.loads(call_nvmeio("inspect", tmp_path / "state.pt", "--json").out)
    assert [each["name"] for each in found["tensors"]] == ["x"]


@pytest.mark.parametrize("writer", ["torch", "nvmeio"])
def test_a_checkpoint_of_torch_is_listed_by_its_metadata(tmp_path, writer):
    """The zip archive at the end of a shard holds only one of its values."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    from nvmeio.torch.dcp import FileSystemWriter

    kind = dcp.FileSystemWriter if writer == "torch" else FileSystemWriter
    state = {"w": torch.ones(300, 70), "b": torch.zeros(4, dtype=torch.bfloat16), "step": 7}
    folder = tmp_path / "step-30"
    dcp.save(state, storage_writer=kind(str(folder)), no_dist=True)
    (shard,) = folder.glob("*.distcp")

    def tensor(name, dtype, shape, nbytes):
        one = {"name": name, "dtype": dtype, "shape": shape, "bytes": nbytes}
        return {**one, "files": [shard.name]}

    found = json.loads(call_nvmeio("inspect", folder, "--json").out)
    assert found["format"] == "torch.distributed.checkpoint"
    assert {each["name"]: each for each in found["tensors"]} == {
        "w": tensor("w", "float32", [300, 70], 84000),
        "b": tensor("b", "bfloat16", [4], 8),
    }
    assert [each["name"] for each in found["values"]] == ["step"]
    shown = call_nvmeio("inspect", folder).out.splitlines()
    assert shown[0].split() == ["name", "dtype", "shape", "size", "files"]
    assert shown[-1] == "torch.distributed.checkpoint: 2 tensors, 82 KiB; 1 other value"
    refused = call_nvmeio("inspect", shard)
    assert (refused.status, refused.out) == (1, "")
    assert f"`nvmeio inspect {folder}` lists the checkpoint" in refused.err
    found = call_nvmeio("verify", folder)
    assert found.status == 1
    assert "it has a checkpoint of torch.distributed.checkpoint" in found.err


def metadata_of(name=b"Vw\n", size=b")", properties=b"(Vtorch.float32\nt"):
    """Return a pickle that describes one tensor; the arguments are pickled already."""

    def made(state):
        return b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81" + state + b"b"

    described = size + b"Vproperties\n" + made(properties) + b"Vchunks\n]"
    tensor = made(b"}(Vsize\n" + described + b"u")
    tensors = b"}(" + name + tensor + b"u"
    state = b"}(Vstorage_data\nNVstate_dict_metadata\n" + tensors + b"u"
    return b"\x80\x02" + made(state) + b"."


def test_metadata_of_one_tensor_is_listed(tmp_path):
    (tmp_path / ".metadata").write_bytes(metadata_of())
    found = call_nvmeio("inspect", tmp_path)
    assert "torch.distributed.checkpoint: 1 tensor, 1 B" in found.out
    assert f"{tmp_path}: no file has all bytes of 'w'\n" in found.err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}.",
        b"\x80\x02K\x01.",
        metadata_of(name=b"K\x01"),
        metadata_of(size=b"(I" + b"9" * 400 + b"\nt"),
        metadata_of(properties=b")"),
    ],
    ids=["empty", "cut", "number", "name", "size", "dtype"],
)
def test_metadata_that_describes_no_checkpoint_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    found = call_nvmeio("inspect", tmp_path)
    assert found.status == 1
    assert f"{tmp_path}/.metadata: it" in found.err
    assert "Traceback" not in found.err


def test_a_step_of_a_checkpointer_is_listed(tmp_path):
    root = tmp_path / "run"
    metadata = {"loss": 0.5, "shape": (1, 2), "worst": float("nan")}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(30, {"model": {"w": np.zeros(10)}}, metadata=metadata)
    found = json.loads(call_nvmeio("inspect", root / "step-30", "--json").out)
    assert [each["name"] for each in found["tensors"]] == ["model/w"]
    assert found["metadata"]["step"] == 30
    # As in the list of steps.
    told = {"loss": 0.5, "shape": [1, 2], "worst": {"float": "nan"}}
    (step,) = json.loads(call_nvmeio("checkpoints", root, "--json").out)["steps"]
    assert found["metadata"]["metadata"] == step["metadata"] == told
    assert "step: 30" in call_nvmeio("inspect", root / "step-30").out
    assert f"`nvmeio checkpoints {root}` lists them" in call_nvmeio("inspect", root).err
    (root / "step-30" / "manifest.json").unlink()
    assert "manifest.json is missing" in call_nvmeio("inspect", root / "step-30").err


def hostile_pickle(kind):
    """Return a pickle that would take much memory, time or stack."""
    if kind == "memo":
        return b"\x80\x02}r" + (1 << 30).to_bytes(4, "little") + b"."
    if kind == "deep":
        return b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
    if kind == "doubled":
        # A tuple that holds the previous one twice, forty times over.
        return b"\x80\x02)" + b"q\x00h\x00\x86" * 40 + b"."
    # A tensor with a negative extent.
    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n"
        b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
        b"K\x00(J\xff\xff\xff\xfftK\x01\x85\x89}tRs."
    )


@pytest.mark.parametrize("kind", ["memo", "deep", "doubled", "negative", "deflated"])
def test_hostile_torch_files_are_refused(tmp_path, kind):
    path = tmp_path / "state.pt"
    how = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr("state/data.pkl", hostile_pickle(kind))
        archive.writestr("state/version", b"3\n")
    found = call_nvmeio("inspect", path)
    assert "Traceback" not in found.err
    if kind == "doubled":
        assert found.status == 0
        return
    words = {"deflated": "is compressed", "negative": r"has the shape \(-1,\)"}
    words |= {"memo": "remembers 1073741824 objects", "deep": "deeper than 100"}
    assert found.status == 1
    assert re.search(f"{path}: .*{words[kind]}", found.err)


def test_a_pickle_that_is_too_long_is_not_read(tmp_path, monkeypatch, capsys):
    path = tmp_path / "state.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("state/data.pkl", b"\x80\x02}.")
        archive.writestr("state/version", b"3\n")
    assert main(["inspect", str(path)]) == 0
    monkeypatch.setattr(torch_files, "PICKLE_BYTES_MAX", 3)
    assert main(["inspect", str(path)]) == 1
    assert f"{path}: its pickle has 4 B; the limit is 3 B\n" in capsys.readouterr().err


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_the_arrays_of_an_npz_file_are_listed(tmp_path, save):
    path = tmp_path / "arrays.npz"
    save(path, x=np.arange(6.0).reshape(2, 3), y=np.array(7, np.int16))
    found = listed(path)
    assert found["format"] == "npz"
    x, y = found["tensors"]
    assert (x["name"], x["dtype"], x["shape"], x["bytes"]) == ("x", "float64", [2, 3], 48)
    assert (y["name"], y["dtype"], y["shape"], y["bytes"]) == ("y", "int16", [], 2)
    if save is np.savez:
        data = path.read_bytes()
        assert data[x["offset"] :][:48] == np.arange(6.0).tobytes()
    else:
        assert x["offset"] is None


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_may_have_no_arrays(tmp_path, save):
    save(tmp_path / "x.npz")
    found = listed(tmp_path / "x.npz")
    assert (found["format"], found["tensors"]) == ("npz", [])
    os.truncate(tmp_path / "x.npz", 10)
    assert "truncated" in call_nvmeio("inspect", tmp_path / "x.npz").err


def test_a_npy_file_of_objects_is_named_as_such(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}, None]), allow_pickle=True)
    found = listed(tmp_path / "x.npy")
    assert found["metadata"] == {"order": "C", "pickled": "Python objects"}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_whole_modules_and_tensors_of_all_layouts_are_listed(tmp_path, legacy):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    path = tmp_path / "state.pt"
    dense = torch.arange(12.0).reshape(3, 4)
    state = {
        "module": module,
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8),
        "rows": dense[1:],
    }
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    found = listed(path)
    tensors = {each["name"]: each for each in found["tensors"]}
    assert found["format"] == ("torch, before 1.6" if legacy else "torch")
    expected = {f"module/{name.replace('.', '/')}" for name in module.state_dict()}
    assert set(tensors) == expected | {"coo", "csr", "quantized", "rows"}
    coo, csr, quantized = (tensors[name] for name in ("coo", "csr", "quantized"))
    assert (coo["dtype"], coo["shape"]) == ("float32 sparse_coo", [3, 4])
    assert coo["bytes"] == 11 * (2 * 8 + 4)
    assert (csr["dtype"], csr["shape"]) == ("float32 sparse_csr", [3, 4])
    assert csr["bytes"] == 11 * (8 + 4) + 4 * 8
    assert (quantized["dtype"], quantized["bytes"]) == ("qint8", 12)
    data = path.read_bytes()
    for name, tensor in module.state_dict().items():
        one = tensors[f"module/{name.replace('.', '/')}"]
        assert data[one["offset"] :][: one["bytes"]] == tensor.numpy().tobytes()
    rows = tensors["rows"]
    assert data[rows["offset"] :][: rows["bytes"]] == dense[1:].numpy().tobytes()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_storages_without_a_tensor_are_listed(tmp_path, legacy):
    torch = pytest.importorskip("torch")
    path, numbers = tmp_path / "x.pt", torch.arange(4)
    state = {"typed": numbers.storage(), "plain": torch.ones(3).untyped_storage()}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    typed, plain = listed(path)["tensors"]
    assert (typed["name"], typed["dtype"], typed["shape"]) == (
        "typed",
        "int64 storage",
        [4],
    )
    assert (plain["dtype"], plain["bytes"]) == ("uint8 storage", 12)
    found = path.read_bytes()[typed["offset"] :][: typed["bytes"]]
    assert found == numbers.numpy().tobytes()


def test_a_module_alone_is_named_by_its_class(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(3, 2), tmp_path / "module.pt")
    found = listed(tmp_path / "module.pt")
    assert found["metadata"] == {"class": "torch.nn.modules.linear.Linear"}
    assert [each["name"] for each in found["tensors"]] == ["weight", "bias"]


def test_a_file_of_torchscript_is_listed(tmp_path):
    torch = pytest.importorskip("torch")
    module = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3))
    torch.jit.save(module, tmp_path / "module.pt")
    found = listed(tmp_path / "module.pt")
    assert found["format"] == "TorchScript"
    assert [(each["name"], each["shape"]) for each in found["tensors"]] == [
        ("weight", [2, 3]),
        ("bias", [2]),
    ]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.999])
def test_a_truncated_file_of_torch_is_named_as_such(tmp_path, legacy, part):
    torch = pytest.importorskip("torch")
    path = tmp_path / "state.pt"
    state = {"x": torch.ones(3000)}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    os.truncate(path, int(path.stat().st_size * part))
    found = call_nvmeio("inspect", path)
    assert (found.status, found.out) == (1, "")
    assert str(path) in found.err
    assert "truncated" in found.err


def test_a_legacy_file_runs_no_code_and_reads_no_more_than_it_has(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "state.pt"
    state = {"evil": Evil(), "x": torch.ones(1)}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert [each["name"] for each in listed(path)["tensors"]] == ["x"]
    assert not (tmp_path / "made").exists()
    monkeypatch.setattr(torch_files, "PICKLE_BYTES_MAX", 100)
    found = call_nvmeio("inspect", path)
    assert "its pickle has 101 B; the limit is 100 B" in found.err


FOREIGN = {
    "pointer": (POINTER, "it is a Git LFS pointer, not the file itself, of 12345 bytes"),
    "html": (b"<!DOCTYPE html>\n<html>404", "it is a page of HTML"),
    "html, indented": (b"\xef\xbb\xbf\n  <html>", "it is a page of HTML"),
    "xml": (
        b"<?xml version='1.0'?><Error>AccessDenied</Error>",
        "it is XML, as object stores",
    ),
    "empty": (b"", "it is empty"),
    "zeros": (bytes(4096), "it begins with zeros only"),
    "gzip": (gzip.compress(b"x" * 100), "it is compressed by gzip"),
    "pickle": (pickle.dumps({"x": 1}), "it is a pickle"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(600), "it is an HDF5 file"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(600), "it is a GGUF file"),
    "json": (b'{"error": "Repository not found"}', "it is a text, probably JSON"),
    "json lines": (b'{"a":1}\n{"a":2}\n', "it is a text, probably JSON"),
    "csv": ("name,größe\n".encode() * 50, "it is a text"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_a_file_is_is_said_by_inspect_and_by_load_file(tmp_path, kind):
    """The message of load_file stays that of safetensors; a note names file and kind."""
    path = tmp_path / "model.safetensors"
    content, words = FOREIGN[kind]
    path.write_bytes(content)
    found = call_nvmeio("inspect", path)
    assert (found.status, found.out) == (1, "")
    assert f"{path}: {words}" in found.err
    with pytest.raises(SafetensorError, match=r"^Error while deserializing") as caught:
        st.load_file(path)
    assert notes_of(caught.value)[0].startswith(f"{path}: ")
    assert words in notes_of(caught.value)[0]
    # As a worker of a DataLoader sends it.
    assert notes_of(pickle.loads(pickle.dumps(caught.value))) == notes_of(caught.value)
    with pytest.raises(ValueError, match=re.escape(f"is not a .npy file: {words}")):
        nvmeio.load(path)


def sharded(folder):
    save_sharded({"a": np.ones(3), "b": np.ones(3)}, folder, 24)
    return folder, "model.safetensors.index.json"


def step(folder):
    with Checkpointer(folder) as saver:
        return saver.save(1, {"a": np.ones(3)}), "manifest.json"


def distributed(folder):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    torch = pytest.importorskip("torch")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    return folder, ".metadata"


@pytest.mark.parametrize("made", [sharded, step, distributed])
@pytest.mark.parametrize("kind", ["pointer", "html", "empty", "zeros"])
def test_what_is_in_the_place_of_an_index_is_said(tmp_path, made, kind):
    folder, name = made(tmp_path / "folder")
    content, words = FOREIGN[kind]
    (folder / name).write_bytes(content)
    found = call_nvmeio("inspect", folder)
    assert found.status == 1
    assert words in found.err
    assert str(folder / name) in found.err
    if made is sharded:
        with pytest.raises(SafetensorError, match=f"is not the index of a model: {words}"):
            load_sharded(folder, framework="np")


def test_a_damaged_name_in_an_archive_is_an_error_with_the_path(tmp_path):
    path = tmp_path / "arrays.npz"
    np.savez(path, größe=np.ones(3))
    path.write_bytes(path.read_bytes().replace("größe".encode(), b"gr\xff\xff\xff\xff\xff"))
    found = call_nvmeio("inspect", path)
    assert found.status == 1
    assert f"{path}: it begins like a zip archive" in found.err


@pytest.mark.parametrize("kind", sorted({*FOREIGN} - {"pickle"}))
def test_what_a_file_is_is_said_by_load_of_torch(tmp_path, kind):
    pytest.importorskip("torch")
    content, words = FOREIGN[kind]
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # torch raises several
        nvmeio.torch.load(tmp_path / "model.pt")
    assert words in notes_of(caught.value)[-1]


def notes_of(error):
    return error.__notes__


@pytest.mark.parametrize("part", [12, 60, -1])
def test_a_truncated_model_file_is_named_as_such(tmp_path, part):
    path = tmp_path / "model.safetensors"
    st.save_file(TENSORS, path)
    os.truncate(path, part if part > 0 else path.stat().st_size + part)
    assert "truncated" in call_nvmeio("inspect", path).err
    with pytest.raises(SafetensorError) as caught:
        st.load_file(path)
    assert "truncated" in notes_of(caught.value)[0]


def test_a_zip_archive_of_other_files_is_named_as_such(tmp_path):
    path = tmp_path / "model.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"hello")
    found = call_nvmeio("inspect", path)
    assert "a zip archive of 1 file, 'a.txt', and neither" in found.err


def without(path, record):
    """Remove a record of a zip archive."""
    with zipfile.ZipFile(path) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in kept.items():
            if not name.endswith(record):
                archive.writestr(name, content)


def remove_bytes(path, content):
    """Remove bytes from the middle of a file."""
    whole = path.read_bytes()
    assert whole.count(content) == 1
    path.write_bytes(whole.replace(content, b""))


def assert_lacks(path, words, name):
    """Assert that a file or folder is listed with a tensor, and with what is missing."""
    for options in ((), ("--json",)):
        found = call_nvmeio("inspect", path, *options)
        assert found.status == 1
        assert words in found.err
        assert "Traceback" not in found.err
    said = json.loads(found.out)
    assert any(words in each for each in said["problems"])
    assert name in [each["name"] for each in said["tensors"]]


@pytest.mark.parametrize("how", ["record", "version", "cut", "short"])
def test_a_torch_file_that_lacks_a_record_is_an_error(tmp_path, how):
    torch = pytest.importorskip("torch")
    path = tmp_path / "state.pt"
    values = torch.arange(100, dtype=torch.int16)
    torch.save({"x": values, "y": torch.ones(3)}, path)
    if how == "cut":
        remove_bytes(path, values.numpy().tobytes()[50:100])
        assert_lacks(path, "it lacks 50 bytes", "x")
    elif how == "short":
        with zipfile.ZipFile(path) as archive:
            kept = {name: archive.read(name) for name in archive.namelist()}
        kept["state/data/0"] = kept["state/data/0"][:-1]
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in kept.items():
                archive.writestr(name, content)
        assert_lacks(path, "'data/0' was truncated: it has 199 bytes, and a", "x")
    else:
        name = "data/0" if how == "record" else "version"
        without(path, f"state/{name}")
        assert_lacks(path, f"its record '{name}' is missing", "x")


@pytest.mark.parametrize("how", ["cut", "short"])
def test_an_npz_file_that_lacks_bytes_of_an_array_is_an_error(tmp_path, how):
    path = tmp_path / "arrays.npz"
    values = np.arange(100)
    np.savez(path, x=values, y=np.ones(3))
    if how == "cut":
        remove_bytes(path, values.tobytes()[80:160])
        assert_lacks(path, "it lacks 80 bytes", "x")
    else:
        stream = io.BytesIO()
        np.save(stream, values)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", stream.getvalue()[:-1])
        assert_lacks(path, "its array 'x' was truncated", "x")


@pytest.mark.parametrize("how", ["missing", "cut", "chunk"])
def test_a_distributed_checkpoint_that_lacks_bytes_is_an_error(tmp_path, how):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.ones(30, 7), "b": torch.zeros(4)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (shard,) = tmp_path.glob("*.distcp")
    if how == "missing":
        shard.unlink()
        assert_lacks(tmp_path, f"{shard.name} is missing", "w")
    elif how == "cut":
        os.truncate(shard, shard.stat().st_size - 1)
        assert_lacks(tmp_path, f"{shard.name} was truncated: it has", "w")
    else:
        # A shard of which no rank has written its part of the description.
        reader = dcp.FileSystemReader(tmp_path)
        metadata = reader.read_metadata()
        (index,) = (each for each in metadata.storage_data if each.fqn == "w")
        del metadata.storage_data[index]
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        assert_lacks(tmp_path, "no file has all bytes of 'w'", "w")


@pytest.mark.parametrize("how", ["shard", "tensor", "damaged", "numbered"])
def test_a_model_that_lacks_a_file_or_a_tensor_is_an_error(tmp_path, how):
    first, second, _ = save_sharded(TENSORS, tmp_path, 10_000)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    (kept,) = (name for name, place in places.items() if place == first)
    if how == "tensor":
        index.write_text(json.dumps({"weight_map": {**places, "gone": places[kept]}}))
        words = "lacks the tensor 'gone'"
    elif how == "damaged":
        os.truncate(tmp_path / second, (tmp_path / second).stat().st_size - 1)
        words = "it was truncated"
    else:
        (tmp_path / second).unlink()
        words = f"{second} is missing"
    if how == "numbered":
        index.unlink()
        words = "model-...-of-00002.safetensors: 1 of 2 files are missing"
    assert_lacks(tmp_path, words, kept)


def test_a_single_model_is_listed_without_what_other_indices_name(tmp_path):
    """As it is loaded."""
    save_sharded(TENSORS, tmp_path, 10_000)
    st.save_file({"other": np.ones(3)}, tmp_path / "model.safetensors")
    found = listed(tmp_path)
    assert [(e["name"], e["files"]) for e in found["tensors"]] == [
        ("other", ["model.safetensors"])
    ]


def test_ranks_that_have_tensors_of_their_own_lack_no_file(tmp_path):
    for rank, name in enumerate(TENSORS, 1):
        file = f"shard-{rank:05}-model-{rank:05}-of-{len(TENSORS):05}.safetensors"
        st.save_file({name: TENSORS[name]}, tmp_path / file)
    assert {each["name"] for each in listed(tmp_path)["tensors"]} == {*TENSORS}
    (tmp_path / file).unlink()
    words = f"model-...-of-{len(TENSORS):05}.safetensors: 1 of {len(TENSORS)} files are"
    assert_lacks(tmp_path, words, next(iter(TENSORS)))


@pytest.mark.parametrize("size", [{"nvmeio_size": [4, 3]}, {}])
def test_parts_of_ranks_that_are_not_all_there_are_an_error(tmp_path, size):
    for rank, row in enumerate((0, 2), 1):
        said = json.dumps({"w": {"saved_offsets": [row, 0], **size}})
        file = tmp_path / f"shard-{rank:05}-model-00001-of-00001.safetensors"
        st.save_file({"w": np.ones((2, 3))}, file, {"DCP_SHARDING_INFO": said})
    assert [each["shape"] for each in listed(tmp_path)["tensors"]] == [[2, 3]] * 2
    (tmp_path / f"shard-0000{2 if size else 1}-model-00001-of-00001.safetensors").unlink()
    assert_lacks(tmp_path, "the files have 6 of 12 elements of 'w'", "w")


def test_each_of_several_indices_of_models_is_read_by_its_path(tmp_path):
    for name in TENSORS:
        file, index = f"{name}.safetensors", f"{name}.safetensors.index.json"
        st.save_file({name: TENSORS[name]}, tmp_path / file)
        (tmp_path / index).write_text(json.dumps({"weight_map": {name: file}}))
    for name in TENSORS:
        found = listed(tmp_path / f"{name}.safetensors.index.json")
        assert [each["name"] for each in found["tensors"]] == [name]
    assert "it has 2 indices of models" in call_nvmeio("inspect", tmp_path).err


def test_a_step_whose_tensors_are_damaged_is_an_error(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": np.zeros(10)})
    path = tmp_path / "step-1" / "tensors.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"[" + content[9:])
    found = call_nvmeio("inspect", tmp_path / "step-1")
    assert found.status == 1
    assert f"{path}: Error while deserializing header: invalid start" in found.err


def pickled_tensor(shape, *, elements=1, strides=None):
    """Return a pickle of one tensor, of any shape."""

    def numbers(values):
        return b"(" + b"".join(pickle.dumps(each, 2)[2:-1] for each in values) + b"t"

    strides = strides or [1] * len(shape)
    storage = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\n"
    return (
        b"\x80\x02}Va\nctorch._utils\n_rebuild_tensor_v2\n("
        + (storage + pickle.dumps(elements, 2)[2:-1] + b"tQ")
        + (b"K\0" + numbers(shape) + numbers(strides) + b"\x89}tRs.")
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": [2**60 + 1] * 20_000}, "has 20000 dimensions; the limit is 64"),
        ({"shape": [2**62] * 20}, "has 2\\*\\*63 bytes or more"),
        ({"shape": [2**63, 0]}, "has the shape"),
        ({"shape": [2, 2], "strides": [1]}, r"with strides \(1,\)"),
        ({"shape": [2]}, "has bytes up to 8 of its storage '0', which has 4"),
        ({"shape": [1], "elements": -1}, "a storage has -1 elements"),
    ],
)
def test_a_tensor_that_torch_cannot_have_is_refused(tmp_path, changed, words):
    path = tmp_path / "state.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("state/data.pkl", pickled_tensor(**changed))
        archive.writestr("state/data/0", bytes(4))
        archive.writestr("state/version", b"3\n")
    found = call_nvmeio("inspect", path)
    assert (found.status, found.out) == (1, "")
    assert re.search(f"{path}: its pickle cannot be read: .*{words}", found.err)
    assert len(found.err) < 2000


def test_arrays_that_numpy_cannot_have_are_refused(tmp_path):
    def header(shape):
        text = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
        return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text

    for shape in ((2**62,) * 20, (1,) * 65):
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("x.npy", header(shape))
        (tmp_path / "x.npy").write_bytes(header(shape))
        for name in ("x.npz", "x.npy"):
            found = call_nvmeio("inspect", tmp_path / name)
            assert found.status == 1
            assert "Traceback" not in found.err
            assert str(tmp_path / name) in found.err


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("place", ["path", "index", "metadata"])
def test_what_is_not_a_regular_file_is_refused(tmp_path, kind, place):
    names = {"path": "x", "index": "model.safetensors.index.json", "metadata": ".metadata"}
    path = tmp_path / names[place]
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    found = call_nvmeio("inspect", path if place == "path" else tmp_path)
    assert found.status == 1
    assert found.err == f"nvmeio inspect: error: {path}: it is not a regular file\n"


@pytest.mark.parametrize("protocol", [1, 3, 4, 5])
def test_legacy_files_of_every_protocol_are_listed(tmp_path, protocol):
    torch = pytest.importorskip("torch")
    path = tmp_path / "state.pt"
    module = torch.nn.Linear(3, 2)
    torch.save(module, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    found = listed(path)
    assert found["format"] == "torch, before 1.6"
    assert [each["name"] for each in found["tensors"]] == ["weight", "bias"]


def test_dtypes_of_parts_of_a_byte_are_listed_with_their_sizes(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "state.pt"
    state = {
        "quint4x2": torch.quantize_per_tensor(torch.ones(4, 2), 1.0, 0, torch.quint4x2),
        "float4_e2m1fn_x2": torch.empty(6, dtype=torch.float4_e2m1fn_x2),
        "bits16": torch.empty(6, dtype=torch.bits16),
    }
    torch.save(state, path)
    found = {each["dtype"]: each["bytes"] for each in listed(path)["tensors"]}
    assert found == {"quint4x2": 4, "float4_e2m1fn_x2": 6, "bits16": 12}


def test_a_program_of_torch_export_is_named_as_such(tmp_path):
    with zipfile.ZipFile(tmp_path / "program.pt2", "w") as archive:
        archive.writestr("program/archive_format", "pt2")
    found = call_nvmeio("inspect", tmp_path / "program.pt2")
    assert "it is a program of torch.export" in found.err


def test_a_page_of_html_in_the_place_of_a_shard_is_named_as_such(tmp_path):
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(FOREIGN["html"][0])
    assert f"{path}: it is a page of HTML" in call_nvmeio("inspect", path).err


def test_names_from_files_cannot_command_the_terminal(tmp_path):
    st.save_file({"x": TENSORS["bias"]}, tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a\x1b[2J"}}))
    found = call_nvmeio("inspect", index)
    assert found.status == 1
    assert r"a\x1b[2J is missing" in found.err


def test_a_long_name_does_not_widen_the_rows_of_others(tmp_path):
    tensors = {"n" * 10_000: np.zeros(1), **{f"t{i}": np.zeros(1) for i in range(100)}}
    st.save_file(tensors, tmp_path / "model.safetensors")
    assert len(call_nvmeio("inspect", tmp_path / "model.safetensors").out) < 50_000
