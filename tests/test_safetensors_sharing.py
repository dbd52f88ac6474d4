"""Tensors that share memory are found, refused and saved as by safetensors."""

import itertools

import pytest

pytest.importorskip("torch")

import safetensors.torch
import torch

import nvmeio.safetensors.torch
from model_samples import bits_of, outcome
from nvmeio.safetensors import _sharing

BASE = torch.arange(48.0).reshape(2, 4, 6)
FLAT = BASE.view(-1)

CASES = {
    "nothing": {},
    "alone": {"a": BASE},
    "same": {"b": BASE, "a": BASE, "c": BASE},
    "halves": {"a": FLAT[:24], "b": FLAT[24:]},
    "halves and all": {"a": FLAT[:24], "b": FLAT[24:], "c": FLAT},
    "overlap": {"a": FLAT[:30], "b": FLAT[20:]},
    "chain": {"a": FLAT[:20], "b": FLAT[10:30], "c": FLAT[25:40], "d": FLAT[44:]},
    "inside": {"a": FLAT, "b": FLAT[3:5], "c": FLAT[40:]},
    "empty": {"a": FLAT[:0], "b": FLAT, "c": torch.empty(0), "d": torch.empty(0)},
    "dtypes": {"a": BASE, "b": BASE.view(torch.int32), "c": BASE.view(torch.uint8)},
    "transposed": {"a": BASE, "b": BASE.transpose(0, 2)},
    "meta": {"a": torch.empty(3, device="meta"), "b": torch.empty(3, device="meta")},
    "two pairs": {"a": BASE, "b": BASE, "c": (other := torch.ones(5)), "d": other},
}


def like_sets(found):
    """Return sets of names, or an error that names them, without their order."""
    return sorted(map(sorted, found)) if isinstance(found, list) else found[0]


@pytest.mark.parametrize("tensors", CASES.values(), ids=CASES)
def test_shared_tensors_are_found_as_by_safetensors(tensors):
    theirs, ours = safetensors.torch, _sharing
    expected = outcome(theirs._find_shared_tensors, tensors)
    found = outcome(ours._find_shared_tensors, tensors)
    assert like_sets(found) == like_sets(expected)
    for name in ("_is_complete", "storage_ptr", "storage_size"):
        for tensor in tensors.values():
            assert getattr(ours, name)(tensor) == getattr(theirs, name)(tensor)
    for tensor in tensors.values():
        if tensor.is_contiguous() and not tensor.is_meta:
            assert ours._end_ptr(tensor) == theirs._end_ptr(tensor)


@pytest.mark.parametrize("tensors", CASES.values(), ids=CASES)
def test_the_same_names_are_removed_as_by_safetensors(tensors):
    names = [None, [], ["b"], ["c", "a"], ["z"]]
    for preferred, discarded in itertools.product(names, names):
        options = {"preferred_names": preferred, "discard_names": discarded}
        expected = outcome(safetensors.torch._remove_duplicate_names, tensors, **options)
        found = outcome(_sharing._remove_duplicate_names, tensors, **options)
        if isinstance(expected, tuple):
            assert found[0] == expected[0]
            # The names in between are a set.
            assert found[1].split("{")[0] == expected[1].split("{")[0]
            assert found[1].split("}")[-1] == expected[1].split("}")[-1]
        else:
            assert found == expected


def test_the_private_names_of_safetensors_exist():
    for name in ("_find_shared_tensors", "_remove_duplicate_names", "_getdtype"):
        assert hasattr(nvmeio.safetensors.torch, name)
    for name in ("_TYPES", "_SIZE", "_view2torch", "storage_ptr", "storage_size"):
        assert hasattr(nvmeio.safetensors.torch, name)
    for dtype, found in safetensors.torch._TYPES.items():
        assert nvmeio.safetensors.torch._getdtype(dtype) == found
        size = nvmeio.safetensors.torch._SIZE[found]
        assert size == safetensors.torch._SIZE[found]


class Tied(torch.nn.Module):
    """A model whose head is its embedding, and with half of its rows as a buffer."""

    def __init__(self, seed=0, *, strided=False):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(5)
        if strided:
            self.register_buffer("moved", torch.randn(3, 4).T)


@pytest.mark.parametrize("metadata", [None, {"head.weight": "mine"}, {"format": "pt"}])
def test_a_model_is_saved_as_by_safetensors(tmp_path, metadata):
    model = Tied()
    for module, name in ((safetensors.torch, "theirs"), (nvmeio.safetensors.torch, "ours")):
        kept = None if metadata is None else dict(metadata)
        module.save_model(model, tmp_path / name, kept)
    with (
        safetensors.safe_open(tmp_path / "theirs", "pt") as theirs,
        safetensors.safe_open(tmp_path / "ours", "pt") as ours,
    ):
        assert ours.metadata() == theirs.metadata()
        assert list(ours.keys()) == list(theirs.keys())


@pytest.mark.parametrize("force", [True, False])
def test_noncontiguous_tensors_are_copied_or_refused(tmp_path, force):
    model = Tied(strided=True)
    expected = outcome(
        safetensors.torch.save_model, model, tmp_path / "theirs", None, force
    )
    found = outcome(
        nvmeio.safetensors.torch.save_model, model, tmp_path / "ours", None, force
    )
    assert found == expected
    assert (found is None) == force


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", ["none", "more", "fewer", "other name", "shape"])
def test_a_model_is_loaded_as_by_safetensors(tmp_path, strict, change):
    saved = Tied(seed=1)
    safetensors.torch.save_model(saved, tmp_path / "model")
    state = safetensors.torch.load_file(tmp_path / "model")
    if change == "more":
        state["extra"] = torch.ones(3)
    elif change == "fewer":
        del state["norm.bias"]
    elif change == "other name":
        state["head.weight"] = state.pop("embed.weight")
    elif change == "shape":
        state["norm.bias"] = torch.ones(2, 2)
    safetensors.torch.save_file(state, tmp_path / "model")
    models = Tied(seed=2), Tied(seed=2)
    expected = outcome(safetensors.torch.load_model, models[0], tmp_path / "model", strict)
    found = outcome(
        nvmeio.safetensors.torch.load_model, models[1], tmp_path / "model", strict
    )
    assert found == expected
    for name, tensor in models[0].state_dict().items():
        assert bits_of(models[1].state_dict()[name]) == bits_of(tensor)
