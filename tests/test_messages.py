"""Messages for mistakes that users made, with the remedy."""

import io
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import nvmeio
import nvmeio.torch
from nvmeio.safetensors import safe_open
from nvmeio.safetensors.numpy import save_file


def closed(file):
    """Close a file, and return it."""
    file.close()
    return file


MISTAKES = {
    "a list to be read into": (
        lambda folder: nvmeio.read_into([0.0] * 3, folder / "data"),
        TypeError,
        "which has no memory of its own; use an array in its place",
    ),
    "a file of the kernel's": (
        lambda folder: nvmeio.read_into(bytearray(10), "/proc/self/stat"),
        OSError,
        r"nvmeio\.read_file\(\) reads the kernel's own files",
    ),
    "many of a file of the kernel's": (
        lambda folder: nvmeio.default_handle().read_many(
            [(bytearray(10), "/proc/self/stat", 0)]
        ),
        OSError,
        r"nvmeio\.read_file\(\) reads the kernel's own files",
    ),
    "memory for a file": (
        lambda folder: nvmeio.read_into(bytearray(1), io.BytesIO(b"x")),
        TypeError,
        r"file is of type BytesIO, which has no descriptor; it must be a path, a desc",
    ),
    "a dtype of torch's for numpy": (
        lambda folder: nvmeio.empty(3, torch.float32),
        TypeError,
        r"dtype is torch\.float32; nvmeio\.torch\.empty\(\) makes tensors",
    ),
    "a gather with swapped arguments": (
        lambda folder: nvmeio.default_handle().gather([0], "data", 1, bytearray(1)),
        TypeError,
        "offsets is the path 'data'; .* are the first two arguments swapped",
    ),
    "a write with swapped arguments": (
        lambda folder: nvmeio.write_file(str(folder / "data"), np.zeros(3)),
        TypeError,
        "path is of type ndarray; .* are the two arguments swapped",
    ),
    "an archive to load": (
        lambda folder: nvmeio.load(folder / "archive.npz"),
        ValueError,
        r"not a \.npy file: it is a zip archive, as .*; torch\.load or numpy\.load reads",
    ),
    "bfloat16 for float16": (
        lambda folder: nvmeio.ArrayFile(folder / "half.npy", mode="r+").__setitem__(
            0, torch.zeros((), dtype=torch.bfloat16)
        ),
        TypeError,
        r"a tensor of torch\.bfloat16 cannot be assigned to elements of float16",
    ),
    "a pattern of archives": (
        lambda folder: nvmeio.torch.TarDataset(folder / "shard-{000..010}.tar"),
        FileNotFoundError,
        r"patterns are not expanded: .* sorted\(glob\.glob\('.*shard-\*\.tar'\)\)",
    ),
    "a pattern of tokens in a list": (
        lambda folder: nvmeio.torch.TokenDataset([folder / "train_*.bin"], 4),
        FileNotFoundError,
        r"patterns are not expanded: .* sorted\(glob\.glob\('.*train_\*\.bin'\)\)",
    ),
    "names for tensors of a model": (
        lambda folder: safe_open(folder / "model.safetensors", "np").get_many(["weight"]),
        TypeError,
        "indices is of type list; it must be a dict from names to indices, or to None",
    ),
    "a row of no rows": (
        lambda folder: nvmeio.ArrayFile(folder / "none.npy").gather([0]),
        IndexError,
        r"rows\[0\] is 0, and there are no rows",
    ),
    "a sample of no samples": (
        lambda folder: nvmeio.torch.TokenDataset(folder / "none.npy", 4)[0],
        IndexError,
        r"dataset is empty: block_size 4 needs 5 tokens, and '.*none\.npy' has 0",
    ),
}


@pytest.fixture
def folder(tmp_path):
    """A folder with files to make mistakes with."""
    (tmp_path / "data").write_bytes(bytes(100))
    np.savez(tmp_path / "archive.npz", one=np.zeros(3))
    np.save(tmp_path / "half.npy", np.zeros(3, np.float16))
    np.save(tmp_path / "none.npy", np.zeros(0, np.int64))
    save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_mistake_is_reported_with_its_remedy(folder, name):
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call(folder)
    assert (folder / "data").read_bytes() == bytes(100)


def test_a_fake_tensor_is_refused_without_torchs_warnings():
    script = (
        "import torch, nvmeio\n"
        "from torch._subclasses import FakeTensorMode\n"
        "with FakeTensorMode():\n"
        "    tensor = torch.empty(10)\n"
        "try:\n"
        "    nvmeio.read_into(tensor, '/dev/null')\n"
        "except TypeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "it is a FakeTensor and has no data" in done.stdout
    assert done.stderr == ""
