"""Generate with a model that is larger than memory, and fine-tune it by LoRA.

    python examples/run_beyond_memory.py --folder model --size 1e9 --memory 128MiB

The model is a mixture of experts with a table of n-grams, Qwen4 of transformers with
random weights, and is written first.  Then a process whose memory is limited reads its
weights from there: the experts that the router chooses, and rows of the table.  Another
one with the same limit loads the model in the ordinary way.  Try ``--size 20e9 --memory
1GiB --limit 2048``.  The limit needs the right to make control groups; without it, both
processes only say how much memory they took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.core_model_loading import revert_weight_conversion

import nvmeio
import nvmeio.safetensors.torch
import nvmeio.torch

WIDTH, EXPERTS, CHOSEN = 256, 64, 4
# Larger models get wider layers, not more than about so many: each layer of so small a
# model costs Python some 10 ms for a token, and keeps 5 MB for the backward pass.
LAYERS = 12
SHARD_BYTES, PIECE_BYTES = 1 << 28, 1 << 25
TOKENS, STEPS = 16, 3


def config_of(size: float) -> Any:
    """Return the configuration of a model of about `size` bytes, half of them a table."""
    layer_bytes = EXPERTS * 3 * WIDTH * (2 * WIDTH) * 2
    factor = 1
    while size / 2 / layer_bytes / factor**2 > 2 * LAYERS:
        factor *= 2
    width = factor * WIDTH
    return transformers.Qwen4ExpTextConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=max(1, int(size / 2 / layer_bytes / factor**2 / 4)) * 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        moe_intermediate_size=2 * width,
        shared_expert_intermediate_size=64,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        hc_lowrank=32,
        ple_layer_ids=[1],
        ple_embed_dim=16 * WIDTH,
        ngram_vocab_size_base=max(500, int(size / 2 / (2 * WIDTH) / 16)),
        split_ngram_parts=64,
        eos_token_id=2,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=64,
        indexer_budget=64,
        indexer_compress_ratio=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 6, 6],
        },
    )


def write(folder: Path, size: float) -> int:
    """Write a checkpoint as transformers would, a file at a time; return its size."""
    config = config_of(size)
    with torch.device("meta"):
        model = transformers.Qwen4ExpForCausalLM._from_config(config, dtype=torch.bfloat16)
    named = revert_weight_conversion(model, dict(model.named_parameters()))
    folder.mkdir(parents=True)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    noise = torch.randn(1_000_003, dtype=torch.bfloat16).mul_(0.02)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = 0
    for number, (name, tensor) in enumerate(named.items(), 1):
        # The same numbers again and again, because new ones would take minutes.
        count = tensor.numel()
        values = noise.repeat(-(-count // len(noise)))[:count]
        shard[name] = values.view(tensor.shape)
        total += tensor.nbytes
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES or number == len(
            named
        ):
            place = f"model-{number:06}.safetensors"
            nvmeio.safetensors.torch.save_file(shard, folder / place, align=4096)
            places |= dict.fromkeys(shard, place)
            shard = {}
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return total


def drive_speed(folder: Path) -> float:
    """Return how many bytes a second the largest file is read with, at most."""
    path = max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    # Touched before, and small beside the limit.
    memory = np.ones(min(path.stat().st_size, PIECE_BYTES), np.uint8)
    pieces, handle = min(path.stat().st_size // len(memory), 8), nvmeio.default_handle()
    begin = time.perf_counter()
    with nvmeio.File(path) as file:
        for piece in range(pieces):
            handle.read(memory, file, piece * len(memory))
    return pieces * len(memory) / (time.perf_counter() - begin)


def peak() -> str:
    """Return the most memory that this process has taken."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found is not None
    return f"{int(found[1]) / 2**20:.2f} GiB"


def generate(model: Any, stats: Any) -> None:
    """Generate tokens; print how many a second, and what the drive would allow."""
    ids = torch.randint(3, 1000, (1, 8), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, max_new_tokens=2, **options)
    before, begin = stats(), time.perf_counter()
    model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **options)
    seconds = time.perf_counter() - begin
    words = f"generated {TOKENS / seconds:.2f} tokens a second"
    after = stats()
    if after and (moved := after["bytes_read"] - before["bytes_read"]):
        waited = (after["seconds_waited"] - before["seconds_waited"]) / seconds
        bound = TOKENS * drive_speed(Path(model.config.name_or_path)) / moved
        words += f"; read {moved / TOKENS / 1e6:.1f} MB for each, so the drive allows "
        words += f"{bound:.1f}; waited for it {waited:.0%} of the time"
    print(words, flush=True)


def tune(model: Any) -> None:
    """Fine-tune adapters of the attention for a few steps."""
    tuned = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "out_proj"]))
    own = [each for each in tuned.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    ids = torch.randint(3, 1000, (1, 32), generator=torch.Generator().manual_seed(1))
    begin = time.perf_counter()
    losses = []
    for _ in range(STEPS):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.3f}")
    seconds = (time.perf_counter() - begin) / STEPS
    print(f"fine-tuned with losses {', '.join(losses)}, {seconds:.1f} s a step", flush=True)


def work(how: str, folder: Path, memory: str) -> None:
    """Generate and fine-tune, in a process of its own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers
    begin = time.perf_counter()
    if how == "disk_offload":
        model = nvmeio.torch.load_disk_offload(
            folder, memory=memory, tables="*ngram_embedding"
        )
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    print(f"loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    is_on_drive = how == "disk_offload"
    generate(model, lambda: nvmeio.torch.disk_stats(model) if is_on_drive else {})
    tune(model)
    print(f"took {peak()} of memory at most", flush=True)


@contextlib.contextmanager
def limited(megabytes: int) -> Iterator[list[str]]:
    """Make a control group; yield the words that start a program in it."""
    top = Path("/sys/fs/cgroup")
    old = (top / "memory").is_dir()
    group = (top / "memory" if old else top) / f"nvmeio-example-{os.getpid()}"
    try:
        group.mkdir()
        name = "memory.limit_in_bytes" if old else "memory.max"
        (group / name).write_text(str(megabytes << 20), encoding="ascii")
    except OSError as error:
        print(f"memory is not limited, because {error.strerror.lower()}", flush=True)
        with contextlib.suppress(OSError):
            group.rmdir()
        yield []
        return
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def main() -> None:
    """Write the model, and compute with it in both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the model")
    parser.add_argument("--size", type=float, default=5e8, help="its bytes (5e8)")
    parser.add_argument("--memory", default="64MiB", help="for weights (64MiB)")
    parser.add_argument("--limit", type=int, default=900, help="MiB for a process (900)")
    parser.add_argument("--how", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.how:
        work(options.how, options.folder, options.memory)
        return
    if not options.folder.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            total = write(options.folder, options.size)
        print(f"wrote a model of {total / 1e9:.2f} GB", flush=True)
    for how in ("disk_offload", "in memory"):
        print(f"\n{how}, in {options.limit} MiB:", flush=True)
        words = [sys.executable, __file__, "--how", how, "--folder", str(options.folder)]
        with limited(options.limit) as prefix:
            done = subprocess.run(
                [*prefix, *words, "--memory", options.memory], check=False
            )
        if done.returncode < 0:
            print(f"killed by signal {-done.returncode}", flush=True)
        if done.returncode > 0 or (done.returncode and how == "disk_offload"):
            sys.exit(f"{how} has failed")


if __name__ == "__main__":
    main()
