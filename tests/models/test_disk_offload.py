"""Models of transformers whose weights stay on a drive compute the same, to the last bit.

They are tiny, with random weights, and are compared with the same models in memory, which
compute with experts in the order of "eager".
"""

import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from peft import LoraConfig, get_peft_model
from transformers.core_model_loading import ConversionOps, WeightConverter

import nvmeio.safetensors.torch as st
import nvmeio.torch
from docstring_examples import examples, run_example
from nvmeio.torch._weights import pretrained, store

VOCABULARY = 128
WIDTH = 64
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SIZES, "intermediate_size": 96}
LLAMA = {
    **BERT,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
DEEPSEEK = {
    **{name: each for name, each in LLAMA.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
FAMILIES = {
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Llama, tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3ForCausalLM", LLAMA),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**LLAMA, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "Mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}),
    "GPT-OSS": (
        "GptOssForCausalLM",
        {
            **LLAMA,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "Gemma": ("GemmaForCausalLM", LLAMA),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    ),
    "BERT": ("BertForMaskedLM", {**BERT, "vocab_size": VOCABULARY}),
    "T5": (
        "T5ForConditionalGeneration",
        {
            "d_model": WIDTH,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
    ),
    "ViT": ("ViTForImageClassification", {**BERT, "image_size": 32, "patch_size": 8}),
}
NGRAM = {
    **LLAMA,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hc_lowrank": 32,
    "ple_layer_ids": [1],
    "ple_embed_dim": WIDTH,
    "ngram_vocab_size_base": 500,
    "split_ngram_parts": 8,
    "eos_token_id": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 6, 6],
    },
}
FAMILIES["Qwen4, n-grams"] = ("Qwen4ExpForCausalLM", NGRAM)
EXPERTS = ("Qwen3-MoE", "Mixtral", "GPT-OSS", "DeepSeek-V3", "Qwen4, n-grams")
LARGE = 1 << 30


def new_model(family, dtype=torch.float32):
    """Make a model with random weights."""
    kind, options = FAMILIES[family]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    return kind._from_config(kind.config_class(**options), dtype=dtype).eval()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def saved(folder, family, dtype=torch.float32):
    """Save a model in several files; return it as transformers loads it."""
    model = new_model(family, dtype)
    model.save_pretrained(folder, max_shard_size="100KB")
    options = {"experts_implementation": "eager"} if family in EXPERTS else {}
    return type(model).from_pretrained(folder, **options)


def inputs_of(model):
    torch.manual_seed(1)
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(2, 3, 32, 32).to(model.dtype)}
    ids = torch.randint(3, VOCABULARY, (2, 9))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def computed(model):
    """Return logits, and generated tokens if the model generates."""
    inputs = inputs_of(model)
    with torch.no_grad():
        found = [model(**inputs).logits]
    if model.can_generate():
        inputs.pop("decoder_input_ids", None)
        found.append(model.generate(**inputs, max_new_tokens=6, do_sample=False))
    return found


def least_memory(folder):
    with pytest.raises(ValueError, match="memory is 0; it must be") as caught:
        nvmeio.torch.load_disk_offload(folder, memory=0)
    return int(str(caught.value).split("must be ")[1].split()[0])


def on_drive(model):
    return {
        name
        for name, each in model.named_parameters()
        if isinstance(each, type(next(model.parameters()))) and hasattr(each, "store")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_as_in_memory(folder, family, dtype):
    resident = saved(folder, family, dtype)
    expected = computed(resident)
    total = sum(each.nbytes for each in resident.parameters())
    least = least_memory(folder)
    assert least < total
    for memory in (least, (least + total) // 2, 2 * total):
        model = nvmeio.torch.load_disk_offload(folder, memory=memory)
        assert type(model) is type(resident)
        assert on_drive(model) == {name for name, _ in model.named_parameters()}
        found = computed(model)
        assert all(map(torch.equal, found, expected))
        stats = nvmeio.torch.disk_stats(model)
        assert stats["bytes_peak"] <= memory
    # The last one had room for all.
    assert stats["bytes_read"] <= total
    assert not model.training
    assert model.dtype == resident.dtype == dtype
    assert model.name_or_path == resident.name_or_path == str(folder)
    assert (
        model.generation_config == resident.generation_config if model.can_generate() else 1
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_was_made_gets_the_weights_of_a_folder(folder, family):
    """Also where the names of its files are not those of its parameters."""
    resident = saved(folder, family)
    expected = computed(resident)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nvmeio.torch.disk_offload(new_model(family), folder, memory=LARGE)
    assert all(map(torch.equal, computed(model), expected))
    before = new_model(family)
    nvmeio.torch.remove_disk_offload(model)
    assert not on_drive(model)
    named = dict(resident.named_parameters())
    assert all(torch.equal(each, named[name]) for name, each in model.named_parameters())
    if family in EXPERTS:
        assert model.get_experts_implementation() == before.get_experts_implementation()


@pytest.mark.parametrize("family", EXPERTS)
def test_only_the_experts_that_the_router_chose_are_read(folder, family):
    """Of a layer's experts, and each once while there is room for them."""
    resident = saved(folder, family)
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE)
    chosen = []
    for module in resident.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.register_forward_pre_hook(
                lambda module, inputs: chosen.append((module, inputs[1].unique().tolist()))
            )
    inputs = {name: each[:1, :2] for name, each in inputs_of(resident).items()}
    with torch.no_grad():
        expected = resident(**inputs).logits
        assert torch.equal(model(**inputs).logits, expected)
    experts = {
        id(each): each
        for module, _ in chosen
        for each in module.parameters()
        if len(each) == module.num_experts
    }
    dense = sum(each.nbytes for each in resident.parameters() if id(each) not in experts)
    routed = sum(
        each.nbytes // len(each) * len(numbers)
        for module, numbers in chosen
        for each in module.parameters()
    )
    assert any(len(numbers) < module.num_experts for module, numbers in chosen)
    assert nvmeio.torch.disk_stats(model)["bytes_read"] == dense + routed
    with torch.no_grad():
        model(**inputs)
    assert nvmeio.torch.disk_stats(model)["bytes_read"] == dense + routed


def test_of_a_table_of_ngrams_only_rows_are_read(folder):
    expected = computed(saved(folder, "Qwen4, n-grams"))
    name = "model.layers.0.ple.ple_embedding.ngram_embedding"
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE, tables="*ngram_embedding")
    assert all(map(torch.equal, computed(model), expected))
    stats = nvmeio.torch.disk_stats(model)
    rows, columns = dict(model.named_modules())[name].weight.shape
    assert 0 < stats["row_misses"] < rows
    assert stats["bytes_read"] <= stats["bytes_total"] - 4 * columns * (
        rows - stats["row_misses"]
    )
    computed(model)
    assert nvmeio.torch.disk_stats(model)["row_misses"] == stats["row_misses"]
    # All rows are needed by the last layer, if that is the embedding too.
    tied = folder / "tied"
    new_model("Llama, tied").save_pretrained(tied)
    with pytest.raises(ValueError, match="also the weight of a Linear"):
        nvmeio.torch.load_disk_offload(tied, memory=LARGE, tables="*embed_tokens")


def test_experts_as_a_whole_need_room_for_all(folder):
    saved(folder, "Mixtral")
    model = nvmeio.torch.load_disk_offload(folder, memory=least_memory(folder))
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(
        RuntimeError, match=r"4 experts.* experts_implementation is 'nvmeio'"
    ):
        computed(model)
    model.set_experts_implementation("nvmeio")
    computed(model)
    with pytest.raises(RuntimeError, match=r"such as torch\.save, needs more memory"):
        torch.save(model.state_dict(), io.BytesIO())


def trained(model, steps=10):
    """Train adapters of the attention; return gradients and weights of each step."""
    layers = [
        name
        for name, each in model.named_modules()
        if isinstance(each, (torch.nn.Linear, transformers.pytorch_utils.Conv1D))
        and "att" in name.lower()
    ]
    config = LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
    torch.manual_seed(2)
    # In the dtype of the model.
    tuned = get_peft_model(model, config, autocast_adapter_dtype=False)
    own = [each for each in tuned.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    inputs = inputs_of(model)
    found = []
    for _ in range(steps):
        tuned.get_base_model()(**inputs).logits.float().square().mean().backward()
        # Some modules are not used in every pass.
        found += [each.grad.clone() for each in own if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [each.detach().clone() for each in own]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_trained_as_in_memory(folder, family):
    resident = saved(folder, family)
    total = sum(each.nbytes for each in resident.parameters())
    expected = trained(resident)
    least = least_memory(folder)
    for memory in (least, (least + total) // 2, 2 * total):
        model = nvmeio.torch.load_disk_offload(folder, memory=memory)
        pairs = zip(trained(model), expected, strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        assert nvmeio.torch.disk_stats(model)["bytes_peak"] <= memory


def test_adapters_are_trained_by_ddp(folder):
    """Which peft wraps, so that parameters have other names than in the model."""
    saved(folder, "Llama")
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    inputs = inputs_of(model)
    expected = tuned(**inputs).logits
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(tuned)
        assert torch.equal(parallel(**inputs).logits, expected)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_merging_an_adapter_is_refused_before_a_layer_changes(folder, merge, safe):
    """Also into the stacked weights of experts."""
    inputs = inputs_of(saved(folder, "Qwen3-MoE"))
    layers = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    config = LoraConfig(r=4, init_lora_weights=False, **layers)
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE)
    tuned = get_peft_model(model, config)
    with torch.no_grad():
        expected = tuned(**inputs).logits
        with pytest.raises(RuntimeError, match="is on a drive, and cannot be changed"):
            getattr(tuned, merge)(safe_merge=safe)
        assert torch.equal(tuned(**inputs).logits, expected)
    assert not any(getattr(each, "merged", False) for each in tuned.modules())


@pytest.mark.parametrize("rows", [VOCABULARY - 10, VOCABULARY + 10])
def test_resizing_embeddings_is_refused_before_anything_changes(folder, rows):
    saved(folder, "Llama")
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE)
    expected = computed(model)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight is on a drive"):
        model.resize_token_embeddings(rows)
    assert model.config.vocab_size == model.lm_head.out_features == VOCABULARY
    assert all(map(torch.equal, computed(model), expected))


def train_in_bfloat16(folder):
    """Train all families in memory and on the drive; in a process of its own."""
    for family in FAMILIES:
        place = folder / family
        expected = trained(saved(place, family, torch.bfloat16))
        memory = least_memory(place)
        model = nvmeio.torch.load_disk_offload(place, memory=memory)
        found = trained(model)
        assert len(found) == len(expected) > 0, family
        assert any(each.dtype == torch.bfloat16 and each.any() for each in found), family
        assert all(map(torch.equal, found, expected)), family
        assert nvmeio.torch.disk_stats(model)["bytes_peak"] <= memory, family


def test_adapters_are_trained_in_bfloat16_as_in_memory(folder):
    code = "import sys, pathlib, test_disk_offload as test; "
    code += "test.train_in_bfloat16(pathlib.Path(sys.argv[1]))"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        # As in test_packages.py.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, folder],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_converted_as_transformers_does_it(folder, dtype):
    saved(folder, "Qwen3-MoE")
    kind = transformers.Qwen3MoeForCausalLM
    resident = kind.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE, dtype=dtype)
    assert all(map(torch.equal, computed(model), computed(resident)))


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_that_the_files_have_twice(folder, monkeypatch, same):
    """They are one if their values are the same, which are compared piece by piece."""
    monkeypatch.setattr(store, "PIECE_BYTES", 4096)
    saved(folder, "Llama, tied")
    tensors = {}
    for part in folder.glob("*.safetensors"):
        tensors |= st.load_file(part)
        part.unlink()
    (folder / "model.safetensors.index.json").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += not same
    st.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    resident = transformers.LlamaForCausalLM.from_pretrained(folder)
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    assert all(map(torch.equal, computed(model), computed(resident)))


def test_what_the_files_lack_is_initialized(folder):
    """As from_pretrained does it, and it says so."""
    new_model("Llama").model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    model = nvmeio.torch.load_disk_offload(folder, memory=LARGE)
    assert "lm_head.weight" not in on_drive(model)
    assert "model.norm.weight" in on_drive(model)
    assert model.lm_head.weight.std() > 0


class Doubled(ConversionOps):
    """A conversion that computes."""

    def convert(self, input_dict, **_):
        return {name: tensors[0] * 2 for name, tensors in input_dict.items()}

    @property
    def reverse_op(self):
        raise NotImplementedError


def test_a_conversion_that_computes_is_refused(folder, monkeypatch):
    saved(folder, "Llama")
    monkeypatch.setattr(
        "transformers.modeling_utils.get_model_conversion_mapping",
        lambda *_: [WeightConverter("norm.weight", "norm.weight", operations=[Doubled()])],
    )
    with pytest.raises(
        NotImplementedError, match=r"layernorm\.weight is loaded through aten\.mul"
    ):
        nvmeio.torch.load_disk_offload(folder, memory=LARGE)


def test_what_cannot_be_loaded_is_refused(folder):
    saved(folder, "Llama")
    path = folder / "config.json"
    config = json.loads(path.read_text())

    def refused(error, words, **changes):
        path.write_text(json.dumps({**config, **changes}))
        with pytest.raises(error, match=words):
            nvmeio.torch.load_disk_offload(folder, memory=LARGE)

    refused(ValueError, "needs its own code", model_type="of nobody")
    refused(
        ValueError,
        "needs its own code",
        model_type="of nobody",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    refused(ValueError, r"architectures \['Own'\]", architectures=["Own"])
    refused(ValueError, "quantized", quantization_config={"quant_method": "fp8"})
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        nvmeio.torch.load_disk_offload(folder, memory=LARGE)


def test_another_release_warns(folder, monkeypatch):
    saved(folder, "Llama")
    monkeypatch.setattr(pretrained, "TESTED", "4.0.0")
    with pytest.warns(RuntimeWarning, match=r"compared with those of 4\.0\.0") as caught:
        nvmeio.torch.load_disk_offload(folder, memory=LARGE)
    assert caught[0].filename == __file__


def test_hooks_of_accelerate_are_refused(folder):
    accelerate = pytest.importorskip("accelerate")
    model = saved(folder, "Llama")
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="hooks of accelerate"):
        nvmeio.torch.disk_offload(model, folder, memory=LARGE)


@pytest.mark.parametrize("name", examples("transformers"))
def test_the_examples_run(name, tmp_path, monkeypatch):
    run_example(name, tmp_path, monkeypatch)


def test_the_example_computes_with_a_model_beyond_memory(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples" / "run_beyond_memory.py"
    words = ["--folder", tmp_path / "model", "--size", "3e8", "--memory", "48MiB"]
    done = subprocess.run(
        [sys.executable, example, *words], capture_output=True, text=True, check=True
    )
    found = done.stdout.partition("in memory, in")[0]
    assert re.search(r"wrote a model of 0\.\d+ GB", found)
    assert re.search(r"generated [\d.]+ tokens a second; read [\d.]+ MB for each", found)
    assert re.search(r"fine-tuned with losses ([\d.]+, ){2}[\d.]+", found)
    assert done.stderr == ""
