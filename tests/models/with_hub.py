"""Scenarios of huggingface_hub's functions for torch, and of torch's own model files."""

import sys

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import (
    PyTorchModelHubMixin,
    load_state_dict_from_file,
    load_torch_model,
    save_torch_model,
    save_torch_state_dict,
)
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from recorder import play


class Model(torch.nn.Module, PyTorchModelHubMixin):
    """A model that knows how to save and load itself."""

    def __init__(self, width=40):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.bfloat16))


def model():
    """Make a model with weights that are the same in every process."""
    torch.manual_seed(1)
    return Model()


def other():
    """Make a model that must be loaded to be right."""
    torch.manual_seed(2)
    return Model()


def a_model(recorder):
    with recorder.saving():
        save_torch_model(model(), recorder.new_folder("model"))
    found = other()
    with recorder.loading():
        load_torch_model(found, recorder.path("model"))
    recorder.tensors("loaded", found.state_dict())


def shards(recorder):
    state = {f"layer.{n}.weight": torch.arange(1000.0) + n for n in range(9)}
    with recorder.saving():
        save_torch_state_dict(state, recorder.new_folder("model"), max_shard_size="10KB")
    names = sorted(recorder.folder.rglob("*.safetensors"))
    with recorder.loading():
        for path in names:
            recorder.tensors(path.name, load_state_dict_from_file(path))


def shards_into_a_model(recorder):
    with recorder.saving():
        save_torch_model(model(), recorder.new_folder("model"), max_shard_size="5KB")
    found = other()
    with recorder.loading():
        load_torch_model(found, recorder.path("model"), strict=False)
    recorder.tensors("loaded", found.state_dict())


def a_model_that_saves_itself(recorder):
    with recorder.saving():
        model().save_pretrained(recorder.path("model"))
    with recorder.loading():
        found = Model.from_pretrained(recorder.path("model"))
    recorder.tensors("loaded", found.state_dict())


def tensors_that_were_loaded_are_saved_again(recorder):
    """Loaded tensors must have their own storages: the writer makes shards by storage."""
    state = {f"layer.{n}.weight": torch.arange(1000.0) + n for n in range(9)}
    with recorder.saving():
        save_torch_state_dict(state, recorder.new_folder("one"))
    with recorder.loading():
        found = load_state_dict_from_file(recorder.path("one/model.safetensors"))
    with recorder.saving():
        save_torch_state_dict(found, recorder.new_folder("many"), max_shard_size="10KB")
    recorder.tensors("loaded", found)


def a_distributed_checkpoint(recorder):
    """torch's own reader and writer of model files; the writer uses safetensors."""
    state = {"a": torch.arange(3000.0), "b": torch.arange(70).to(torch.bfloat16)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(recorder.path("model")))
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with recorder.loading():
        dcp.load(found, storage_reader=HuggingFaceStorageReader(recorder.path("model")))
    recorder.tensors("loaded", found)


SCENARIOS = (
    a_model,
    shards,
    shards_into_a_model,
    a_model_that_saves_itself,
    tensors_that_were_loaded_are_saved_again,
    a_distributed_checkpoint,
)

if __name__ == "__main__":
    play(SCENARIOS, *sys.argv[1:])
