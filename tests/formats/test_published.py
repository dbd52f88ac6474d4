"""``nvmeio inspect`` beside numpy, torch and safetensors, on files of published packages.

scripts/test-formats downloads the packages of published.txt.
"""

import json
import math
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from commands import call_nvmeio

FOLDER = Path(os.environ.get("NVMEIO_TEST_PUBLISHED", "build/published"))

# For each package: its files, what inspect calls them, and how many tensors they have.
FILES = {
    "lpips": [
        ("lpips/weights/v0.0/alex.pth", "torch, before 1.6", 5),
        ("lpips/weights/v0.1/vgg.pth", "torch, before 1.6", 5),
    ],
    "facenet_pytorch": [("facenet_pytorch/data/onet.pt", "torch, before 1.6", 21)],
    "silero_vad": [
        ("silero_vad/data/silero_vad.jit", "TorchScript", 33),
        ("silero_vad/data/silero_vad_16k.safetensors", "safetensors", 15),
    ],
    "torchmetrics": [
        (
            "torchmetrics/functional/image/dists_models/weights.pt",
            "torch, before 1.6",
            2,
        ),
    ],
    "resampy": [("resampy/data/kaiser_fast.npz", "npz", 3)],
    "msaf": [("msaf/algorithms/olda/models/EstBeats_BeatlesIso.npy", "npy", 1)],
    "pesto_pitch": [
        ("pesto/weights/mir-1k.ckpt", "torch", 16),
        ("pesto/weights/mir-1k_g7.ckpt", "torch", 22),
    ],
    "fairchem_core": [("fairchem/core/models/escn/Jd.pt", "torch", 12)],
    "mtcnn": [("mtcnn/data/mtcnn_weights.npy", "npy", 1)],
    "tslearn": [("tslearn/.cached_datasets/Trace.npz", "npz", 4)],
    "skyfield": [
        ("skyfield/data/iers.npz", "npz", 4),
        ("skyfield/data/historic_deltat.npy", "npy", 1),
    ],
    "nilearn": [("nilearn/glm/tests/spm_dmtx.npz", "npz", 3)],
}
CASES = [
    pytest.param(package, *case, id=f"{package}-{case[0].rpartition('/')[2]}")
    for package, cases in FILES.items()
    for case in cases
]


@pytest.mark.parametrize(("package", "name", "form", "count"), CASES)
def test_a_published_file_is_listed(tmp_path, package, name, form, count):
    wheels = list(FOLDER.glob(f"{package}-*.whl"))
    if not wheels:
        pytest.skip(f"{package} cannot be downloaded here")
    with zipfile.ZipFile(wheels[0]) as archive:
        path = Path(archive.extract(name, tmp_path))
    found = call_nvmeio("inspect", path, "--json")
    assert found.status == 0, found.err
    assert call_nvmeio("inspect", path).status == 0
    found = json.loads(found.out)
    tensors = found["tensors"]
    assert (found["format"], len(tensors)) == (form, count)
    compare(path, form, tensors)
    data = path.read_bytes()
    assert all(
        each["offset"] is None or each["offset"] + each["bytes"] <= len(data)
        for each in tensors
    )
    # The same file, as an interrupted download leaves it.
    cut = tmp_path / "cut"
    cut.write_bytes(data[: len(data) * 2 // 3])
    refused = call_nvmeio("inspect", cut)
    if "pickled" in (found["metadata"] or {}):
        return  # its array ends where its pickle does
    assert (refused.status, refused.out) == (1, "")
    assert str(cut) in refused.err
    assert form == "npy" or "truncated" in refused.err


def compare(path, form, tensors):
    """Compare names, shapes and bytes with what the format's own reader returns."""
    by_name = {each["name"]: each for each in tensors}
    data = path.read_bytes()
    if form in ("npy", "npz"):
        if path.name == "mtcnn_weights.npy":
            return  # it is a pickle, which nobody needs to run
        loaded = np.load(path)
        arrays = dict(loaded) if form == "npz" else {"": loaded}
        assert list(by_name) == list(arrays)
        for key, array in arrays.items():
            each = by_name[key]
            assert (each["dtype"], each["shape"]) == (str(array.dtype), [*array.shape])
            if each["offset"] is not None:
                raw = data[each["offset"] :][: each["bytes"]]
                assert raw == array.tobytes("A")
    elif form == "safetensors":
        with safe_open(path, "np") as file:
            assert set(by_name) == set(file.keys())
            for key in file.keys():  # noqa: SIM118 -- it is no dict
                each = by_name[key]
                raw = data[each["offset"] :][: each["bytes"]]
                assert raw == file.get_tensor(key).tobytes()
    elif form == "TorchScript":
        state = torch.jit.load(path, "cpu").state_dict()
        names = {name.replace(".", "/") for name in state}
        assert names <= set(by_name)
    else:
        if path.name == "mir-1k_g7.ckpt":
            return  # it has objects of another package
        found = torch.load(path, "cpu", weights_only=True)
        state = found.get("state_dict", found) if isinstance(found, dict) else found
        items = state.items() if isinstance(state, dict) else enumerate(state)
        prefix = "state_dict/" if state is not found else ""
        for key, tensor in items:
            each = by_name[f"{prefix}{key}"]
            assert each["shape"] == [*tensor.shape]
            assert each["bytes"] == math.prod(tensor.shape) * tensor.element_size()
            raw = data[each["offset"] :][: each["bytes"]]
            assert not tensor.is_contiguous() or raw == tensor.numpy().tobytes()
