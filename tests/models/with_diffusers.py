"""Scenarios of diffusers: a tiny pipeline from a configuration."""

import sys

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

from recorder import play


def unet():
    """Make a model with weights that are the same in every process."""
    torch.manual_seed(1)
    return UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def drawn(pipeline):
    """Return an image that a pipeline draws."""
    generator = torch.Generator().manual_seed(5)
    images = pipeline(generator=generator, num_inference_steps=2, output_type="np").images
    return torch.from_numpy(images)


def pipeline(recorder):
    made = DDPMPipeline(unet(), DDPMScheduler(num_train_timesteps=10))
    made.set_progress_bar_config(disable=True)
    folder = recorder.path("pipeline")
    with recorder.saving():
        made.save_pretrained(folder)
    with recorder.loading():
        found = DDPMPipeline.from_pretrained(folder)
    found.set_progress_bar_config(disable=True)
    recorder.tensors("loaded", found.unet.state_dict())
    recorder.computed("drawn", drawn(found))


def save_and_load(recorder, saving=(), **loading):
    """Save a model and load it."""
    folder = recorder.path("model")
    with recorder.saving():
        unet().save_pretrained(folder, **dict(saving))
    with recorder.loading():
        found = UNet2DModel.from_pretrained(folder, **loading)
    recorder.tensors("loaded", found.state_dict())


def shards(recorder):
    save_and_load(recorder, {"max_shard_size": "40KB"})


def shards_that_several_threads_load(recorder):
    with torch.no_grad():
        save_and_load(recorder, {"max_shard_size": "40KB"}, low_cpu_mem_usage=True)


def variant_of_another_dtype(recorder):
    save_and_load(recorder, {"variant": "fp16"}, variant="fp16", torch_dtype=torch.float16)


def all_at_once(recorder):
    """Load without accelerate's empty weights, by load_file() or from bytes in memory."""
    save_and_load(recorder, low_cpu_mem_usage=False, disable_mmap=False)


def training_state(recorder):
    """An EMA of weights, as the training scripts save it."""
    from diffusers.training_utils import EMAModel

    model = unet()
    average = EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config)
    with torch.no_grad():
        model.conv_in.weight.add_(1)
    average.step(model.parameters())
    with recorder.saving():
        average.save_pretrained(recorder.path("model"))
    with recorder.loading():
        found = EMAModel.from_pretrained(recorder.path("model"), UNet2DModel)
    shadows = enumerate(found.shadow_params)
    recorder.tensors("loaded", {str(number): each for number, each in shadows})


SCENARIOS = (
    pipeline,
    shards,
    shards_that_several_threads_load,
    variant_of_another_dtype,
    all_at_once,
    training_state,
)

if __name__ == "__main__":
    play(SCENARIOS, *sys.argv[1:])
