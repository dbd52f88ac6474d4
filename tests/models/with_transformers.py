"""Scenarios of transformers: tiny models from configurations, saved and loaded."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from recorder import play

TOKENS = torch.arange(24).reshape(2, 12)


def llama(**options):
    """Make a model with weights that are the same in every process."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"vocab_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**(sizes | options))
    return LlamaForCausalLM(config)


def check(recorder, label, model):
    """Record a model's weights and what it computes."""
    recorder.tensors(label, model.state_dict())
    with torch.no_grad():
        recorder.computed(label, model(TOKENS).logits)


def save_and_load(recorder, model, saving=(), **loading):
    """Save a model, load it as a program does, and record both."""
    folder = recorder.path("model")
    with recorder.saving():
        model.save_pretrained(folder, **dict(saving))
    with recorder.loading():
        found = AutoModelForCausalLM.from_pretrained(folder, **loading)
    check(recorder, "loaded", found)


def one_file(recorder):
    save_and_load(recorder, llama())


def a_larger_model_that_several_threads_load(recorder):
    """100 MB: tensors are read ahead in several batches."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
    save_and_load(recorder, llama(**sizes))


def sharded_with_an_index(recorder):
    save_and_load(recorder, llama(), {"max_shard_size": "60KB"})


def saved_over_a_file_that_was_loaded(recorder):
    """The tensors of the loaded model must not change."""
    folder, model = recorder.path("model"), llama()
    with recorder.saving():
        model.save_pretrained(folder)
    with recorder.loading():
        first = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with recorder.saving():
        model.save_pretrained(folder)
    check(recorder, "first", first)
    with recorder.loading():
        check(recorder, "second", AutoModelForCausalLM.from_pretrained(folder))


def tied_weights(recorder):
    save_and_load(recorder, llama(tie_word_embeddings=True))


def bfloat16(recorder):
    save_and_load(recorder, llama().to(torch.bfloat16), dtype="auto")


def another_dtype_than_saved(recorder):
    save_and_load(recorder, llama(), dtype=torch.bfloat16)


def weights_that_are_missing_or_of_another_size(recorder):
    folder = recorder.path("model")
    with recorder.saving():
        llama().model.save_pretrained(folder)
    torch.manual_seed(2)
    with recorder.loading():
        found = LlamaForCausalLM.from_pretrained(
            folder, vocab_size=201, ignore_mismatched_sizes=True
        )
    recorder.tensors("loaded", found.model.layers.state_dict())


def renamed_weights(recorder):
    """Load a part of BERT from the whole model, where its weights have a prefix."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=200, num_attention_heads=2, **sizes))
    folder = recorder.path("model")
    with recorder.saving():
        model.save_pretrained(folder)
    with recorder.loading():
        found = type(model.bert).from_pretrained(folder, add_pooling_layer=False)
    recorder.tensors("loaded", found.state_dict())


def device_map_with_offload_to_disk(recorder):
    folder = recorder.path("model")
    with recorder.saving():
        llama().save_pretrained(folder, max_shard_size="60KB")
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    device_map |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    with recorder.loading():
        found = AutoModelForCausalLM.from_pretrained(
            folder, device_map=device_map, offload_folder=recorder.path("offload")
        )
        with torch.no_grad():
            recorder.computed("computed", found(TOKENS).logits)
    kept = found.state_dict()
    recorder.tensors("kept", {n: kept[n] for n in kept if kept[n].device.type == "cpu"})
    with recorder.saving():
        found.save_pretrained(recorder.path("again"))


class Examples(Dataset):
    """Sixteen lines of numbers."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        line = torch.arange(index, index + 10)
        return {"input_ids": line, "labels": line}


def trainer(recorder, folder, evaluated=None, **options):
    """Make a trainer of a new model."""
    arguments = TrainingArguments(
        recorder.path(folder),
        per_device_train_batch_size=2,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **({"save_steps": 4} | options),
    )
    return Trainer(llama(), arguments, train_dataset=Examples(), eval_dataset=evaluated)


def checkpoint_and_resume_of_trainer(recorder):
    with recorder.saving():
        whole = trainer(recorder, "whole", max_steps=8)
        whole.train()
        whole.save_model()
    with recorder.loading():
        rest = trainer(recorder, "rest", max_steps=8, save_strategy="no")
        rest.train(resume_from_checkpoint=recorder.path("whole/checkpoint-4"))
    for label, each in (("whole", whole), ("rest", rest)):
        recorder.tensors(label, each.model.state_dict())
        log = each.state.log_history
        recorder.value(label, [line["loss"] for line in log if "loss" in line])


def best_model_of_trainer(recorder):
    """The trainer loads the best model at its end."""
    with recorder.saving():
        each = trainer(
            recorder,
            "run",
            Examples(),
            max_steps=8,
            eval_strategy="steps",
            eval_steps=4,
            load_best_model_at_end=True,
            save_total_limit=1,
            dataloader_num_workers=1,
        )
        each.train()
    with recorder.loading():
        best = AutoModelForCausalLM.from_pretrained(each.state.best_model_checkpoint)
    check(recorder, "best", best)
    recorder.tensors("kept", each.model.state_dict())


SCENARIOS = (
    sharded_with_an_index,
    tied_weights,
    bfloat16,
    device_map_with_offload_to_disk,
    one_file,
    a_larger_model_that_several_threads_load,
    saved_over_a_file_that_was_loaded,
    another_dtype_than_saved,
    weights_that_are_missing_or_of_another_size,
    renamed_weights,
    checkpoint_and_resume_of_trainer,
    best_model_of_trainer,
)

if __name__ == "__main__":
    play(SCENARIOS, *sys.argv[1:])
