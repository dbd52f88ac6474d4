"""Where transformers' own loader puts the tensors of a checkpoint, without reading them."""

import importlib
import os
import sys
import warnings
from typing import Any

import torch
from torch import nn

from nvmeio.torch._weights.lazy import LOADING, Loading
from nvmeio.torch._weights.source import Checkpoint
from nvmeio.torch._weights.store import BY_EXPERT
from nvmeio.torch._weights.tensor import DiskParameter

__all__ = [
    "compute_as_before",
    "compute_by_expert",
    "expert_modules",
    "is_pretrained",
    "loaded_from",
    "loaded_like",
]

# The release with which models were compared.
TESTED = "5.24.0"


def is_pretrained(model: nn.Module) -> bool:
    """Return whether a model is one of transformers'."""
    package = sys.modules.get("transformers")
    return package is not None and isinstance(model, package.PreTrainedModel)


def loaded_like(model: Any, source: Checkpoint) -> tuple[nn.Module, list[str]]:
    """Return a model like one of transformers', and which tensors it has no place for."""
    return _load(type(model), model.config, source, torch.float32, 4)


def loaded_from(
    folder: str, source: Checkpoint, dtype: torch.dtype | None
) -> tuple[nn.Module, list[str]]:
    """Return a model as a folder describes it, and the tensors it has no place for."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"load_disk_offload needs transformers; pip install transformers=={TESTED}"
        ) from error
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise FileNotFoundError(2, "the folder has no config.json", folder)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except ValueError as error:
        raise ValueError(
            f"transformers does not know the model of {folder}, or it needs its own code, "
            "which is never run; load it yourself and call disk_offload()"
        ) from error
    names = list(getattr(config, "architectures", None) or ())
    known = [
        kind
        for kind in (getattr(transformers, name, None) for name in names)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    ]
    if not known:
        raise ValueError(
            f"{folder}/config.json names the architectures {names}, and transformers "
            f"{transformers.__version__} has no such model; load it yourself and call "
            "disk_offload()"
        )
    model, unused = _load(known[0], config, source, dtype or "auto", 4)
    # Adapters save it as the name of the model that they are for.
    model.name_or_path = model.config.name_or_path = folder
    if model.can_generate() and os.path.isfile(
        os.path.join(folder, "generation_config.json")
    ):
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )
    return model, unused


def _load(
    kind: Any, config: Any, source: Checkpoint, dtype: Any, level: int
) -> tuple[Any, list[str]]:
    transformers = sys.modules["transformers"]
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "the model is quantized, by its quantization_config; only weights as they are "
            "computed with can stay on a drive"
        )
    if transformers.__version__ != TESTED:
        warnings.warn(
            f"transformers {transformers.__version__} loads this model; weights on a drive "
            f"were compared with those of {TESTED}",
            RuntimeWarning,
            stacklevel=level,
        )
    refusals: list[NotImplementedError] = []
    token = LOADING.set(Loading(source.equal, refusals))
    try:
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=source.tensors(),
            dtype=dtype,
            output_loading_info=True,
        )
    except RuntimeError as error:
        # The loader has gone on with the others, and printed what it could not convert.
        raise refusals[0] if refusals else error from None
    finally:
        LOADING.reset(token)
    return model, sorted(report["unexpected_keys"])


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that compute with experts which a router has chosen."""
    if not is_pretrained(model):
        return []
    return [
        module
        for module in model.modules()
        if hasattr(type(module).forward, "__wrapped__")
        and isinstance(getattr(module, "num_experts", None), int)
        and hasattr(getattr(module, "config", None), "_experts_implementation")
        and any(
            value is not None and value.dim() > 2 and len(value) == module.num_experts
            for value in module._parameters.values()
        )
    ]


def compute_by_expert(model: Any) -> None:
    """Let a model compute with one expert after the other, in the order of "eager"."""
    moe = importlib.import_module("transformers.integrations.moe")
    moe.ALL_EXPERTS_FUNCTIONS.register(BY_EXPERT, _compute_by_expert)
    vars(model)[_BEFORE] = model.get_experts_implementation()
    model.set_experts_implementation(BY_EXPERT)


def compute_as_before(model: Any) -> None:
    """Undo compute_by_expert(), if that was done."""
    if (before := vars(model).pop(_BEFORE, None)) is not None:
        model.set_experts_implementation(before)


# Where a model keeps how it computed with experts before.
_BEFORE = "_nvmeio_experts_before"


def _compute_by_expert(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: Any
) -> torch.Tensor:
    """Compute with the experts of a module, and read all those of this call at once."""
    weights = [
        value
        for value in self._parameters.values()
        if type(value) is DiskParameter and value.weight.parts
    ]
    forward = type(self).forward.__wrapped__
    if not weights:
        return forward(self, hidden_states, top_k_index, top_k_weights)
    chosen = [
        number for number in top_k_index.unique().tolist() if number < self.num_experts
    ]
    parts = [value.weight.parts[number] for number in chosen for value in weights]
    store = weights[0].store
    try:
        store.prefetch(parts)
        return forward(self, hidden_states, top_k_index, top_k_weights)
    finally:
        store.forget_soon(parts)
