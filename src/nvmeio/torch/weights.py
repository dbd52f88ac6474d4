"""Compute with models whose weights stay on a drive."""

import fnmatch
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nvmeio._arguments.checks import path_of
from nvmeio._arguments.types import Path
from nvmeio._arguments.units import size_of
from nvmeio._memory.heap import give_back
from nvmeio.torch._weights.lazy import LazyTensor
from nvmeio.torch._weights.pretrained import (
    compute_as_before,
    compute_by_expert,
    expert_modules,
    is_pretrained,
    loaded_from,
    loaded_like,
)
from nvmeio.torch._weights.rows import Rows
from nvmeio.torch._weights.source import Checkpoint, check_dtype, open_checkpoint, some
from nvmeio.torch._weights.store import Store, Weight, least_room
from nvmeio.torch._weights.tensor import DiskParameter

__all__ = [
    "disk_offload",
    "disk_stats",
    "load_disk_offload",
    "remove_disk_offload",
]

# Modules that pass the weights of the modules within to one operation.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

_KINDS = ("_parameters", "_buffers")

# The share of the memory for rows of tables.
TABLES = 4

# Where a model keeps what disk_offload() has done to it.
_ATTRIBUTE = "_nvmeio_disk_offload"

# Modules of torch around a model, whose parameters have other names.
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")

# Where DistributedDataParallel finds the names of parameters that it leaves alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"

# What peft puts before the names of a model's parameters.
_PEFT = "base_model.model."


def disk_offload(
    model: nn.Module,
    checkpoint: Path,
    *,
    memory: int | str,
    execution_device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    tables: str | Sequence[str] = (),
) -> nn.Module:
    """Leave the weights of a model on the drive, and read them when they are used.

    The counterpart of ``accelerate.disk_offload``.  The weights come from the model's own
    files, which are not changed; nothing is written.  They are read ahead in the order in
    which they were used before, and stay in memory as far as `memory` allows.

    Parameters
    ----------
    model : torch.nn.Module
        A model, on the CPU or on the meta device.  It is changed: each parameter that the
        checkpoint has becomes one that is on the drive, and cannot be trained.
    checkpoint : str, bytes or os.PathLike
        A safetensors file, an index of several, or a folder with one of these.  Its names
        are those of ``model.state_dict()``.
    memory : int or str
        The limit in bytes for weights in memory, such as "4GiB".  The least is what the
        largest layer needs and the largest weight, which is read ahead of it.
    execution_device : torch.device, str or int, optional
        The device that computes, by default the CPU.  A weight is read into pinned memory
        and copied when it is used; `memory` limits both together.  Buffers and parameters
        that the checkpoint lacks are moved there.
    dtype : torch.dtype, optional
        The dtype of floating-point weights; by default as stored.
    tables : str or sequence of str, optional
        The names of embeddings, such as ``"model.embed_tokens"``, whose rows are read one
        by one, each when it is used; in a name, ``*`` stands for any text.  Up to a quarter
        of `memory` is for rows that were used.

    Returns
    -------
    torch.nn.Module
        The model.

    Raises
    ------
    SafetensorError
        The checkpoint is invalid.  From a forward or backward pass: it was changed since.
    OSError
        The checkpoint cannot be opened.  From a forward or backward pass: a weight cannot
        be read; has errno and path.
    RuntimeError
        From a forward or backward pass: the program holds weights, or views of them, for
        which `memory` has no room.  From whatever would change a weight, as
        ``load_state_dict``, ``to``, ``half`` or an optimizer.
    TypeError, ValueError
        An argument is of the wrong type; `memory` is less than the least; the device does
        not exist, or has no streams and events; a parameter or buffer is on the meta device
        and not in the checkpoint, or has another shape there; or the model is on a drive
        already.  Nothing was changed.

    Warns
    -----
    RuntimeWarning
        The checkpoint has names that the model lacks, and the parameters of the model that
        it lacks stay in memory.

    See Also
    --------
    remove_disk_offload : Bring the weights to memory.
    disk_stats : What was read.

    Notes
    -----
    Results are the same to the bit as with weights in memory at addresses that are
    multiples of 64, as torch allocates them, and so are gradients of inputs, adapters and
    other parameters.  Buffers, and parameters that the checkpoint lacks, stay in memory.

    Between operations a parameter has its shape, dtype and device, and no values.
    ``model.state_dict()`` has these parameters too; ``torch.save`` reads all of them to
    memory.

    Examples
    --------
    >>> import torch
    >>> import nvmeio.safetensors.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 10))
    >>> nvmeio.safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    >>> expected = model(torch.ones(2, 100))
    >>> model = nvmeio.torch.disk_offload(model, "model.safetensors", memory="1MiB")
    >>> torch.equal(model(torch.ones(2, 100)), expected)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is of type {type(model).__name__}; it must be a Module")
    limit = size_of("memory", memory, 0)
    check_dtype(dtype)
    device = _device_of(execution_device)
    _check_whole(model)
    with open_checkpoint(checkpoint) as source:
        tensors: Mapping[str, LazyTensor]
        if is_pretrained(model):
            like, unused = loaded_like(model, source)
            tensors = _lazy_tensors(like)
            del like
        else:
            tensors = source.tensors()
            known = {
                name
                for kind in _KINDS
                for name, module, slot, _ in _named(model, kind)
                if _is_stored(module, slot)
            }
            unused = [name for name in tensors if name not in known]
        offload = _Offload(model, source, tensors, limit, device, dtype, tables)
        offload.warn_of(unused)
        offload.begin()
        del tensors
        # Of the many tensors without values.
        give_back()
    return model


def load_disk_offload(
    folder: Path,
    *,
    memory: int | str,
    execution_device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    tables: str | Sequence[str] = (),
) -> nn.Module:
    """Load a model of transformers whose weights stay on the drive.

    The counterpart of ``AutoModel.from_pretrained``, for a folder on a drive.  The class of
    the model is the one that its ``config.json`` names.  The weights are renamed, split,
    stacked and transposed as the installed release of transformers does it, and read when
    they are used.

    Parameters
    ----------
    folder : str, bytes or os.PathLike
        A folder with ``config.json`` and safetensors files, as ``save_pretrained`` writes
        them.
    memory : int or str
        The limit in bytes for weights in memory, as of `disk_offload`.
    execution_device : torch.device, str or int, optional
        The device that computes, as of `disk_offload`.
    dtype : torch.dtype, optional
        The dtype of the model, by default the one that its config names.
    tables : str or sequence of str, optional
        The names of embeddings whose rows are read one by one, as of `disk_offload`.

    Returns
    -------
    transformers.PreTrainedModel
        The model, for inference.

    Raises
    ------
    FileNotFoundError
        The folder has no ``config.json``, or no safetensors files.
    ImportError
        transformers is not installed.
    NotImplementedError
        Loading needs more than to rename, cast, split, stack and transpose weights.
    SafetensorError, OSError
        As of `disk_offload`.
    TypeError, ValueError
        As of `disk_offload`; or the model is quantized, or needs code that is not
        transformers'.

    Warns
    -----
    RuntimeWarning
        The installed transformers is not the release that models were compared with.

    See Also
    --------
    disk_offload : Leave the weights of any model on the drive.

    Notes
    -----
    Neither code from the folder nor pickled files are run.  What the files lack is
    initialized, as ``from_pretrained`` does; it says so, and it stays in memory.

    Examples
    --------
    >>> import torch
    >>> import transformers
    >>> config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained("model")
    >>> model = nvmeio.torch.load_disk_offload("model", memory="4MiB")
    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5).shape
    torch.Size([1, 8])
    """
    limit = size_of("memory", memory, 0)
    check_dtype(dtype)
    device = _device_of(execution_device)
    place = os.fsdecode(path_of(folder))
    with open_checkpoint(place) as source:
        model, _ = loaded_from(place, source, dtype)
        tensors = _lazy_tensors(model)
        _Offload(model, source, tensors, limit, device, None, tables, casts=True).begin()
        del tensors
        # Of the many tensors without values.
        give_back()
    return model


def _device_of(chosen: torch.device | str | int | None) -> torch.device:
    """Return the device that computes, with its number."""
    try:
        device = torch.device("cpu" if chosen is None else chosen)
    except RuntimeError as error:
        raise ValueError(
            f"execution_device is {chosen!r}, and torch knows no such device"
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise ValueError("execution_device is 'meta'; it must be able to compute")
    try:
        module = torch.get_device_module(device)
        usable = module.is_available()
    except RuntimeError:
        module, usable = None, False
    if not usable:
        raise ValueError(
            f"execution_device is {str(device)!r}, and there is no such device"
        )
    if not hasattr(module, "current_stream") or not hasattr(module, "Event"):
        raise ValueError(
            f"execution_device is {str(device)!r}, a device without streams and events"
        )
    number = module.current_device() if device.index is None else device.index
    return torch.device(device.type, number)


def _check_whole(model: nn.Module) -> None:
    """Refuse a model whose weights something else manages."""
    for name, module in model.named_modules():
        where = f"the module {name}" if name else "the model"
        own = module._parameters.values()
        if hasattr(module, _ATTRIBUTE) or any(type(each) is DiskParameter for each in own):
            raise ValueError("the weights of this model are on a drive already")
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                f"{where} has hooks of accelerate, which move weights too; load the model "
                "without device_map, or call accelerate.hooks.remove_hook_from_submodules"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"{where} is wrapped by FullyShardedDataParallel, which distributes its "
                "weights; only models of one process can have theirs on a drive"
            )
        if type(module).__name__ in _WRAPPERS:
            raise ValueError(
                f"{where} is wrapped by {type(module).__name__}; pass the model within"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise ValueError(
                f"{name} is a DTensor, distributed over ranks; only models of one process "
                "can have their weights on a drive"
            )


def _lazy_tensors(model: nn.Module) -> dict[str, LazyTensor]:
    return {
        name: value
        for kind in _KINDS
        for name, *_, value in _named(model, kind)
        if isinstance(value, LazyTensor)
    }


def remove_disk_offload(model: nn.Module) -> nn.Module:
    """Bring the weights of a model to memory, as ordinary parameters.

    Parameters
    ----------
    model : torch.nn.Module
        A model that ``disk_offload`` returned, or a module around it.

    Returns
    -------
    torch.nn.Module
        The same model; its parameters do not require gradients.

    Raises
    ------
    OSError, SafetensorError
        A weight cannot be read; the model is as it was.
    ValueError
        The weights of the model are not on a drive.

    Examples
    --------
    >>> import torch
    >>> import nvmeio.safetensors.torch
    >>> model = torch.nn.Linear(10, 10)
    >>> nvmeio.safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    >>> nvmeio.torch.disk_offload(model, "model.safetensors", memory="1MiB").weight
    DiskParameter('weight', shape=(10, 10), dtype=torch.float32)
    >>> nvmeio.torch.remove_disk_offload(model).weight.shape
    torch.Size([10, 10])
    """
    _end(_owner(model))
    return model


def disk_stats(model: nn.Module) -> dict[str, int | float]:
    """Return what was read of the weights of a model on a drive.

    Parameters
    ----------
    model : torch.nn.Module
        A model that ``disk_offload`` returned, or a module around it.

    Returns
    -------
    dict of str to int or float
        ``bytes_total``, of all weights; ``bytes_limit``, the argument `memory`;
        ``bytes_used``, of weights in memory now, and ``bytes_peak``, the most so far;
        ``bytes_read``; ``hits``, uses of weights that were in memory; ``waits_ahead``, uses
        of weights that were being read ahead and had not come; ``waits_demanded``, uses of
        weights that were not expected, or for which there was no room; and
        ``seconds_waited``.  With tables also ``row_hits`` and ``row_misses``.

    Raises
    ------
    ValueError
        The weights of the model are not on a drive.

    Examples
    --------
    >>> import torch
    >>> import nvmeio.safetensors.torch
    >>> model = torch.nn.Linear(10, 10)
    >>> nvmeio.safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    >>> model = nvmeio.torch.disk_offload(model, "model.safetensors", memory="1MiB")
    >>> nvmeio.torch.disk_stats(model)["bytes_total"]
    440
    """
    found: _Source = vars(_owner(model))[_ATTRIBUTE]
    return found.stats()


def _owner(model: nn.Module) -> nn.Module:
    """Return the module that was passed to disk_offload(); others may wrap it."""
    found = [module for module in model.modules() if _ATTRIBUTE in vars(module)]
    if not found:
        raise ValueError(
            "the weights of this model are not on a drive; pass the module that "
            "disk_offload() returned"
        )
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} modules of this model were passed to disk_offload(); pass one "
            "of them"
        )
    return found[0]


def _named(model: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the parameters or buffers of all modules, also those that are tied."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in getattr(module, kind).items():
            if value is not None:
                yield f"{prefix}.{name}" if prefix else name, module, name, value


def _is_stored(module: nn.Module, name: str) -> bool:
    """Return whether ``load_state_dict`` loads a parameter or buffer of a module."""
    return name not in module._non_persistent_buffers_set


class _Offload:
    """A model whose weights are on a drive, and where its parameters are in its modules."""

    def __init__(
        self,
        model: nn.Module,
        source: Checkpoint,
        tensors: Mapping[str, LazyTensor],
        limit: int,
        device: torch.device,
        dtype: torch.dtype | None,
        tables: str | Sequence[str],
        *,
        casts: bool = False,
    ) -> None:
        self.model, self.source, self.tensors = model, source, tensors
        self.device, self.dtype, self.casts = device, dtype, casts
        self.weights: dict[int, Weight] = {}  # by the identity of the parameter before
        self.slots: list[tuple[nn.Module, str, Weight]] = []
        self.buffers: list[tuple[nn.Module, str, Weight]] = []
        self._find_weights()
        self.experts = expert_modules(model)
        self._split_experts()
        names = [tables] if isinstance(tables, str) else list(tables)
        self.rows: dict[Weight, Rows] = {}
        self._find_tables(names)
        calls = self._calls()
        del self.tensors
        used = list({weight: None for _, _, weight in self.slots})
        found = [weight for weight in used if weight.is_table]
        share = max(0, min(limit // TABLES, limit - least_room(used, calls)))
        self.rows = {each: Rows(each, share // len(found)) for each in found}
        kept = sum(each.nbytes for each in self.rows.values())
        self.store = Store(used, calls, limit - kept)
        # The parameters keep the store, and that the files.
        weakref.finalize(self.store, source.close).atexit = False

    def _find_weights(self) -> None:
        missing = []
        for kind, places in (("_parameters", self.slots), ("_buffers", self.buffers)):
            found: dict[int, Weight] = {}
            for name, module, slot, value in _named(self.model, kind):
                # Of several names of one, the last is used, as by load_state_dict.
                if name in self.tensors and _is_stored(module, slot):
                    found[id(value)] = self._checked(name, value)
            for name, module, slot, value in _named(self.model, kind):
                if (weight := found.get(id(value))) is not None:
                    places.append((module, slot, weight))
                elif value.is_meta:
                    missing.append(name)
            if kind == "_parameters":
                self.weights = found
        if missing:
            raise ValueError(
                f"{self.source.path} lacks {some(missing)}, which the model has on the "
                "meta device; make the model in memory, or one of transformers by "
                "load_disk_offload()"
            )
        if not self.slots:
            own = [name for name, *_ in _named(self.model, "_parameters")]
            raise ValueError(
                f"{self.source.path} has no parameter of the model; its names are "
                f"{some(list(self.tensors))}, and the model's {some(own)}"
            )

    def warn_of(self, unused: Sequence[str]) -> None:
        """Warn of tensors of the checkpoint that the model does not have."""
        if not unused:
            return
        alone = [
            name
            for name, *_, value in _named(self.model, "_parameters")
            if id(value) not in self.weights
        ]
        words = f"the model has no {some(unused)}, which {self.source.path} has"
        if alone:
            words += f"; and {some(alone)}, which that lacks, stay in memory"
        warnings.warn(words, RuntimeWarning, stacklevel=3)

    def _checked(self, name: str, value: torch.Tensor) -> Weight:
        weight = self.source.weight(name, self.tensors[name], self.dtype, self.casts)
        if weight.shape != value.shape:
            raise ValueError(
                f"{name} has the shape {tuple(weight.shape)} in {self.source.path}, and "
                f"{tuple(value.shape)} in the model"
            )
        if value.device.type not in ("cpu", "meta") and value.device != self.device:
            raise ValueError(
                f"{name} is on {value.device}; it must be on {self.device}, the CPU or meta"
            )
        weight.device = self.device
        return weight

    def _split_experts(self) -> None:
        """Let experts be read one by one, where the model computes with them so."""
        for module in self.experts:
            for value in module._parameters.values():
                weight = self.weights.get(id(value))
                if weight is not None and weight.shape[:1] == (module.num_experts,):
                    weight.split()

    def _find_tables(self, names: Sequence[str]) -> None:
        """Let rows of embeddings be read one by one, where their names say so."""
        modules = dict(self.model.named_modules())
        for pattern in names:
            found = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
            if not found:
                raise ValueError(
                    f"tables has {pattern!r}, and the model has no such module"
                )
            for name in found:
                module = modules[name]
                weight = self.weights.get(id(getattr(module, "weight", None)))
                if not isinstance(module, nn.Embedding) or weight is None:
                    raise ValueError(
                        f"tables has {name!r}, a {type(module).__name__}; it must be an "
                        "Embedding whose weight the checkpoint has"
                    )
                weight.is_table = True
        for module, slot, weight in self.slots:
            if weight.is_table and not isinstance(module, nn.Embedding):
                raise ValueError(
                    f"tables has {weight.name}, which is also the {slot} of a "
                    f"{type(module).__name__}, and that needs all rows"
                )

    def _calls(self) -> list[list[Weight]]:
        """Return which weights are passed to one operation, at most."""
        calls = []
        for module in self.model.modules():
            own = module.modules() if isinstance(module, _WHOLE) else [module]
            found = [
                self.weights[id(value)]
                for each in own
                for value in each._parameters.values()
                if id(value) in self.weights
            ]
            calls.append([each.parts[0] if each.parts else each for each in found])
        return calls

    def begin(self) -> None:
        """Read the buffers, and then replace the parameters, which does not fail."""
        buffers = {weight: _read_now(weight) for *_, weight in self.buffers}
        made = {
            weight: DiskParameter.of(weight, self.store, self.rows.get(weight))
            for *_, weight in self.slots
        }
        self._move_rest()
        for module, slot, weight in self.slots:
            module._parameters[slot] = made[weight]
        for module, slot, weight in self.buffers:
            module._buffers[slot] = buffers[weight]
        _refresh(self.model)
        if self.experts:
            compute_by_expert(self.model)
        for module in self.model.modules():
            if any(type(each) is DiskParameter for each in module.parameters()):
                module._apply = _Method(_apply, module)
                module.compile = _Method(_refuse_compile, module)
                module.extra_repr = _Method(_extra_repr, module)
                module.register_load_state_dict_pre_hook(_refuse_load)
        ignored = vars(self.model).get(_IGNORED)
        setattr(self.model, _IGNORED, _Names(_names_on_drive, self.model))
        setattr(self.model, _ATTRIBUTE, _Source(self.store, self.rows, ignored))

    def _move_rest(self) -> None:
        """Move what stays in memory to the device that computes."""
        read = {id(module._buffers[slot]) for module, slot, _ in self.buffers}
        rest = [
            (kind, module, slot, value)
            for kind in _KINDS
            for _, module, slot, value in _named(self.model, kind)
            if value.device != self.device
            and id(value) not in self.weights
            and id(value) not in read
        ]
        moved = {id(value): value.data.to(self.device) for *_, value in rest}
        for kind, module, slot, value in rest:
            if kind == "_buffers":
                module._buffers[slot] = moved[id(value)]
            else:
                value.data = moved[id(value)]


class _Unpickled:
    """A part of a model that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model whose weights are on a drive cannot be pickled; save what "
            "state_dict() returns"
        )


class _Source(_Unpickled):
    """Where a model has its weights from; it keeps no module."""

    def __init__(
        self, store: Store, rows: Mapping[Weight, Rows], ignored: Sequence[str] | None
    ) -> None:
        self.store, self.rows = store, rows
        # What the model itself keeps from DistributedDataParallel.
        self.ignored = ignored

    def stats(self) -> dict[str, int | float]:
        """Return what was read of weights and of rows of tables."""
        found = self.store.stats()
        for rows in self.rows.values():
            read = rows.stats()
            found["row_hits"] = found.get("row_hits", 0) + read["hits"]
            found["row_misses"] = found.get("row_misses", 0) + read["misses"]
            for name in ("bytes_limit", "bytes_used", "bytes_peak"):
                found[name] += read["bytes_used"]
            found["bytes_read"] += read["bytes_read"]
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Source":
        # A copy of the model has the same weights.
        return self


class _Method(_Unpickled):
    """A method of one module instead of that of its class, which does not keep the module.

    Otherwise a model, with its memory and files, stayed until garbage is collected.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.function, self.module = function, weakref.ref(module)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        module = self.module()
        if module is None:
            raise RuntimeError(
                "this module is a shallow copy of one that is gone, whose weights are on a "
                "drive; use copy.deepcopy"
            )
        return self.function(module, *arguments, **options)

    @property
    def _torchscript_modifier(self) -> Any:
        """Refuse torch.jit, which asks all methods of a module for this."""
        _refuse_compile(self.module() or nn.Module())
        raise AttributeError("_torchscript_modifier")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Method":
        return type(self)(self.function, memo.get(id(self.module()), self.module()))


class _Names(_Method):
    """Names that a method returns when they are asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(self())


def _end(model: nn.Module) -> None:
    """Read all weights into parameters of their own, in a model or in its copy."""
    made: dict[int, nn.Parameter] = {}
    slots = []
    for _, module, slot, value in _named(model, "_parameters"):
        if type(value) is DiskParameter:
            if id(value) not in made:
                found = _read_now(value.weight)
                made[id(value)] = nn.Parameter(found, requires_grad=False)
            slots.append((module, slot, made[id(value)]))
    for module, slot, value in slots:
        module._parameters[slot] = value
    _refresh(model)
    for module in model.modules():
        vars(module).pop("_apply", None)
        vars(module).pop("compile", None)
        vars(module).pop("extra_repr", None)
        _unhook(module)
    compute_as_before(model)
    ignored = vars(model).pop(_ATTRIBUTE).ignored
    if isinstance(vars(model).get(_IGNORED), _Names):
        delattr(model, _IGNORED)
        if ignored is not None:
            setattr(model, _IGNORED, ignored)


def _unhook(module: nn.Module) -> None:
    """Remove the hook of begin() from a module."""
    hooks = module._load_state_dict_pre_hooks
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", None) is _refuse_load:
            del hooks[key]


def _read_now(weight: Weight) -> torch.Tensor:
    """Read a buffer, or a weight whatever the limit is."""
    alone = weight.copy()
    return Store([alone], [], alone.room).fetch([alone])[alone].clone()


def _refresh(model: nn.Module) -> None:
    """Let recurrent modules, which have a list of their own, use the new parameters."""
    for module in model.modules():
        names = getattr(module, "_flat_weights_names", None)
        if isinstance(module, nn.RNNBase) and names:
            module._flat_weights = [getattr(module, name, None) for name in names]


def _apply(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """Refuse ``to``, ``half`` and the like, before any weight or buffer is changed."""
    for parameter in self.parameters():
        if type(parameter) is DiskParameter:
            made = fn(parameter)
            if made.device != parameter.device:
                parameter._refuse(
                    f"moved from {parameter.device} to {made.device}",
                    "name the device that computes as execution_device=, or ",
                )
            if made.dtype != parameter.dtype:
                parameter._refuse(
                    f"converted from {parameter.dtype} to {made.dtype}",
                    "name the dtype as dtype=, or ",
                )
            if made is not parameter:
                parameter._refuse("replaced by another tensor")
    found: nn.Module = type(self)._apply(self, fn, recurse)
    return found


def _names_on_drive(self: nn.Module) -> Iterator[str]:
    """Yield what DistributedDataParallel would otherwise send, also as peft names it."""
    own = vars(self)[_ATTRIBUTE].ignored
    yield from getattr(type(self), _IGNORED, ()) if own is None else own
    for name, *_, value in _named(self, "_parameters"):
        if type(value) is DiskParameter:
            yield name
            yield _PEFT + name


def _refuse_compile(self: nn.Module, *_: Any, **__: Any) -> None:
    """Refuse ``compile``, after which no call would work."""
    for parameter in self.parameters():
        if type(parameter) is DiskParameter:
            parameter._refuse("compiled")


def _extra_repr(self: nn.Module) -> str:
    """Say what is on the drive, to ``print``."""
    names = [name for name, each in self._parameters.items() if type(each) is DiskParameter]
    words = [type(self).extra_repr(self)]
    if names:
        words.append(f"{' and '.join(names)} on a drive")
    return ", ".join(filter(None, words))


def _refuse_load(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if type(parameter) is DiskParameter and prefix + name in state:
            parameter._refuse("loaded")
