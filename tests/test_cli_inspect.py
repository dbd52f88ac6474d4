"""``nvmeio inspect`` lists the contents of files."""

import json
import os
import pathlib
import re
import zipfile

import numpy as np
import pytest

import nvmeio.safetensors.numpy as st
from commands import call_nvmeio
from nvmeio._cli import main, torch_files
from nvmeio.checkpoint import Checkpointer
from nvmeio.safetensors import save_sharded

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
    path.write_bytes(b"hello, this is no model")
    found = call_nvmeio("inspect", path)
    assert (found.status, found.out) == (1, "")
    assert str(path) in found.err
    assert "neither a .npy file nor a model file" in found.err


def test_a_model_in_several_files_is_an_error_that_says_what_to_inspect(tmp_path):
    sharded = tmp_path / "sharded"
    save_sharded(TENSORS, sharded, 10_000)
    assert "model files" in (text := call_nvmeio("inspect", sharded).err)
    assert text.rstrip().endswith("; inspect one of them")
    text = call_nvmeio("inspect", sharded / "model.safetensors.index.json").err
    assert "it is the index of a model in several files" in text
    shard = sharded / "model-00001-of-00002.safetensors"
    assert call_nvmeio("inspect", shard).status == 0


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

    tensor = made(b"}(Vsize\n" + size + b"Vproperties\n" + made(properties) + b"u")
    tensors = b"}(" + name + tensor + b"u"
    state = b"}(Vstorage_data\nNVstate_dict_metadata\n" + tensors + b"u"
    return b"\x80\x02" + made(state) + b"."


def test_metadata_of_one_tensor_is_listed(tmp_path):
    (tmp_path / ".metadata").write_bytes(metadata_of())
    assert call_nvmeio("inspect", tmp_path).status == 0


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
    assert main(["inspect", str(path)]) == 0
    monkeypatch.setattr(torch_files, "PICKLE_BYTES_MAX", 3)
    assert main(["inspect", str(path)]) == 1
    assert f"{path}: its pickle has 4 B; the limit is 3 B\n" in capsys.readouterr().err
