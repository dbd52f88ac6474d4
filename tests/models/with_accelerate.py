"""Scenarios of accelerate: training states, and models larger than memory."""

import sys

import torch
from accelerate import (
    Accelerator,
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)

from recorder import play

INPUT = torch.linspace(-1, 1, 64).reshape(2, 32)


def model():
    """Make a model with weights that are the same in every process."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 48), torch.nn.Tanh()
    )


def step(accelerator, made, optimizer):
    """Train for one step, and return the loss."""
    optimizer.zero_grad()
    loss = made(INPUT).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    return loss.item()


def prepared():
    """Make the objects that training needs."""
    accelerator = Accelerator(cpu=True)
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    return (accelerator, *accelerator.prepare(made, optimizer))


def state_of_a_training(recorder):
    everything = prepared()
    accelerator = everything[0]
    losses = [step(*everything) for _ in range(2)]
    with recorder.saving():
        accelerator.save_state(recorder.path("state"))
    losses += [step(*everything) for _ in range(2)]
    with recorder.loading():
        accelerator.load_state(recorder.path("state"))
    again = [step(*everything) for _ in range(2)]
    assert again == losses[2:]
    recorder.value("losses", losses)
    recorder.tensors("trained", everything[1].state_dict())


def tied_weights_in_a_state(recorder):
    accelerator = Accelerator(cpu=True)
    tied = model()
    tied.append(torch.nn.Linear(48, 48))
    tied[4].weight = tied[2].weight
    made = accelerator.prepare(tied)
    with recorder.saving():
        accelerator.save_state(recorder.path("state"))
    with torch.no_grad():
        made[4].weight.zero_()
    with recorder.loading():
        accelerator.load_state(recorder.path("state"))
    recorder.tensors("loaded", made.state_dict())


def saved(recorder, **options):
    """Save a model as accelerate does, and return the folder."""
    folder = recorder.path("model")
    with recorder.saving():
        Accelerator(cpu=True).save_model(model(), folder, **options)
    return folder


def dispatched(recorder, folder, device_map):
    """Load a model onto devices, and record what it computes."""
    with init_empty_weights():
        empty = model()
    with recorder.loading():
        found = load_checkpoint_and_dispatch(
            empty, folder, device_map=device_map, offload_folder=recorder.path("offload")
        )
        with torch.no_grad():
            recorder.computed("computed", found(INPUT))
    kept = found.state_dict()
    recorder.tensors("kept", {n: kept[n] for n in kept if kept[n].device.type == "cpu"})


def one_file_and_dispatch(recorder):
    dispatched(recorder, saved(recorder), {"": "cpu"})


def shards_and_dispatch_with_offload_to_disk(recorder):
    folder = saved(recorder, max_shard_size="8KB")
    dispatched(recorder, folder, {"0": "cpu", "1": "cpu", "2": "disk", "3": "cpu"})


def shards_into_a_model(recorder):
    folder = saved(recorder, max_shard_size="8KB")
    found = model()
    with torch.no_grad():
        found[0].weight.zero_()
    with recorder.loading():
        load_checkpoint_in_model(found, folder, device_map={"": "cpu"})
    recorder.tensors("loaded", found.state_dict())


def offload_of_a_whole_model(recorder):
    """Offload into files of numpy, beside one of safetensors."""
    found = disk_offload(model(), recorder.path("offload"), torch.device("cpu"))
    with torch.no_grad():
        recorder.computed("computed", found(INPUT))
    with recorder.saving():
        Accelerator(cpu=True).save_model(found, recorder.path("model"))


SCENARIOS = (
    state_of_a_training,
    shards_and_dispatch_with_offload_to_disk,
    tied_weights_in_a_state,
    one_file_and_dispatch,
    shards_into_a_model,
    offload_of_a_whole_model,
)

if __name__ == "__main__":
    play(SCENARIOS, *sys.argv[1:])
