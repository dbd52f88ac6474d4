"""Read and write model files as torch tensors.

The functions have the names, arguments, results and errors of ``safetensors.torch``, so
that ``import nvmeio.safetensors.torch`` can replace ``import safetensors.torch``.
"""

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from nvmeio._safetensors.file import Direct, Mapped
from nvmeio._safetensors.writing import Source, pack
from nvmeio._safetensors.writing import save as _save
from nvmeio._streams.progress import Progress
from nvmeio._tensors.dtypes import FORMAT_NAMES, header_dtype, header_shape
from nvmeio._tensors.frameworks import Torch
from nvmeio._tensors.memory import bytes_of, content_problem, freed_problem
from nvmeio.safetensors._open import check_backend, safe_open
from nvmeio.safetensors._sharing import (
    _find_shared_tensors,
    _remove_duplicate_names,
    storage_ptr,
    storage_size,
)
from nvmeio.safetensors._specs import TensorSpec, deserialize, serialize, serialize_file
from nvmeio.safetensors._whole import load_file as _load_file

__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "serialize",
    "serialize_file",
    "storage_ptr",
    "storage_size",
]

# Private in safetensors too, but other libraries import them.  An older torch lacks some of
# the dtypes.
_TYPES: dict[str, torch.dtype] = {
    dtype: getattr(torch, name)
    for name, dtype in FORMAT_NAMES.items()
    if hasattr(torch, name)
}
_SIZE: dict[torch.dtype, int] = {dtype: dtype.itemsize for dtype in _TYPES.values()}


def _getdtype(dtype_str: str) -> torch.dtype:
    """Return torch's dtype for a dtype of the format."""
    return _TYPES[dtype_str]


def _view2torch(safeview: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return tensors for the result of deserialize(), without copying."""
    framework = Torch()
    made = {}
    for name, view in safeview:
        dtype = framework.dtype(view["dtype"])
        shape = framework.shape(view["dtype"], tuple(view["shape"]))
        if len(view["data"]):
            made[name] = torch.frombuffer(view["data"], dtype=dtype).view(shape)
        else:
            made[name] = torch.empty(shape, dtype=dtype, device="cpu")
    return made


def _sources(tensors: Mapping[str, torch.Tensor]) -> list[Source]:
    """Return the tensors to write, or raise the error of safetensors."""
    _evaluate_tensors_for_save(tensors)
    found = []
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not "
                "allowed. It either means you are trying to save tensors which are "
                "reference of each other in which case it's recommended to save only the "
                "full tensors, and reslice at load time, or simply call `.contiguous()` on "
                "your tensor to pack it before saving."
            )
        if tensor.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        dtype = header_dtype(str(tensor.dtype).removeprefix("torch."))
        shape = header_shape(dtype, tuple(tensor.shape))
        found.append(Source(name, dtype, shape, functools.partial(bytes_of, tensor)))
    return found


def _has_no_memory(tensor: torch.Tensor) -> str:
    """Return why a tensor has no memory of its own, which safetensors does not say."""
    if type(tensor).__name__ == "DTensor":
        return (
            "it is a DTensor, which is distributed over several processes; pass its "
            "full_tensor(), or save it by nvmeio.torch.dcp"
        )
    if is_lazy(tensor) or tensor._is_zerotensor() or tensor.is_nested:
        return content_problem(tensor)
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return freed_problem(tensor)
    if tensor.is_meta or not tensor.numel():
        return ""
    try:
        if tensor.untyped_storage().data_ptr():
            return ""
    except RuntimeError as error:
        # A wrapper may have no storage, or refuse to show it and say why.
        if kind.untyped_storage is not torch.Tensor.untyped_storage:
            return str(error)
    return (
        f"it is a {kind.__module__}.{kind.__qualname__}, which wraps other tensors; pass "
        "those, or its dequantize()"
    )


def _evaluate_tensors_for_save(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise the errors of safetensors for tensors that it refuses to save."""
    if not isinstance(tensors, dict):
        raise ValueError(
            f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received "
                f"{type(tensor)}"
            )
    sparse = [name for name, each in tensors.items() if each.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does "
            "not support. You can make it a dense tensor before saving with `.to_dense()` "
            "but be aware this might make a much larger file than needed."
        )
    for name, tensor in tensors.items():
        if problem := _has_no_memory(tensor):
            raise ValueError(f"Key `{name}` is invalid: {problem}")
    shared = [names for names in _find_shared_tensors(tensors) if len(names) > 1]
    if shared:
        raise RuntimeError(
            f"""
            Some tensors share memory, this will lead to duplicate memory on disk and potential differences when loading them again: {shared}.
            A potential way to correctly save your model is to use `save_model`.
            More information at https://huggingface.co/docs/safetensors/torch_shared_tensors
            """  # noqa: E501
        )


def save(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a safetensors file with these tensors.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        The tensors by name, dense and contiguous; no two may share memory.
    metadata : dict of str to str, optional
        Metadata to store in the header.

    Returns
    -------
    bytes
        The bytes that ``save_file`` would write.

    Raises
    ------
    RuntimeError
        Tensors share memory; the message names them.
    ValueError
        A value is not a tensor, or a tensor is sparse or not contiguous.
    SafetensorError
        The format lacks a dtype, or a name is reserved.
    NotImplementedError
        A tensor is on the meta device.

    Examples
    --------
    >>> import torch
    >>> data = nvmeio.safetensors.torch.save({"weight": torch.arange(4)})
    >>> nvmeio.safetensors.torch.load(data)
    {'weight': tensor([0, 1, 2, 3])}
    """
    return pack(_sources(tensors), metadata)


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    align: Literal[8, 4096] = 8,
    sync: bool = True,
    atomic: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write tensors to a file, which gets its name when it is complete.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        The tensors by name, dense and contiguous; no two may share memory.
    filename : str or os.PathLike
        The file to write.  An existing file is replaced atomically, and its mode is kept.
    metadata : dict of str to str, optional
        Metadata to store in the header.
    align : {8, 4096}, default 8
        With 8, the file is the same as that of safetensors, byte for byte.  With 4096,
        tensors of whole pages come first and begin at page boundaries, which makes loading
        faster; every reader accepts such files.
    sync : bool, default True
        Sync the file before it gets its name, and return only when both are on the device.
        With False nothing is synced, and a power failure may leave an incomplete file.
    atomic : bool, default True
        With False an existing file is written in place, for file systems that cannot rename
        files; after an error it is incomplete.  Tensors that are mapped from the file are
        copied first.
    progress : callable, optional
        Called during the write with two ints: bytes written so far, and bytes in total.

    Raises
    ------
    RuntimeError, SafetensorError, NotImplementedError
        As ``save``.
    ValueError
        As ``save``; or `align` is neither 8 nor 4096.
    OSError
        Writing failed; has errno and path.  The message for ENOSPC says how many bytes are
        needed and free.  The old file is unchanged, with `atomic`.

    Notes
    -----
    Uses 32 MiB of memory besides the tensors; if they are on a device, also that of the
    largest tensor.  Releases the GIL.

    Examples
    --------
    >>> import torch
    >>> tensors = {"weight": torch.arange(4)}
    >>> nvmeio.safetensors.torch.save_file(tensors, "model.safetensors", {"by": "me"})
    >>> with nvmeio.safetensors.safe_open("model.safetensors", "pt") as file:
    ...     file.metadata()
    {'by': 'me'}
    """
    options: Any = {"align": align, "sync": sync, "atomic": atomic}
    _save(_sources(tensors), filename, metadata, progress=progress, **options)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file in memory.

    Parameters
    ----------
    data : bytes
        The contents of the file.

    Returns
    -------
    dict of str to torch.Tensor
        The tensors by name, on the CPU, copied from `data`.

    Raises
    ------
    SafetensorError
        The bytes are not a valid safetensors file.

    Examples
    --------
    >>> import torch
    >>> data = nvmeio.safetensors.torch.save({"weight": torch.arange(4)})
    >>> nvmeio.safetensors.torch.load(data)
    {'weight': tensor([0, 1, 2, 3])}
    """
    return _view2torch(deserialize(data))


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: Literal["mmap", "pread"] = "mmap",
    names: Iterable[str] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    progress: Progress | None = None,
    direct: Direct = "auto",
    mapped: Mapped = False,
) -> dict[str, torch.Tensor]:
    """Read the tensors of a file.

    Parameters
    ----------
    filename : str or os.PathLike
        The file to read.
    device : str, int or torch.device, default "cpu"
        The device of the tensors.
    backend : {"mmap", "pread"}, default "mmap"
        Accepted for compatibility, without effect; `mapped` decides.
    names : iterable of str, optional
        The tensors to read; by default all, or those of `out`.
    out : dict of str to torch.Tensor, optional
        Tensors to read into, of the same dtypes and shapes as in the file.
    progress : callable, optional
        Called during the read with two ints: bytes read so far, and bytes in total.
    direct : {"auto", True, False}, default "auto"
        Whether to bypass the page cache.  "auto": for what it does not have.  True:
        always, which fails if the file system lacks O_DIRECT.  False: never.
    mapped : {False, True, "auto"}, default False
        Whether to map the file instead of reading it; see Notes.  "auto": if the page cache
        has all of it, `direct` is not True and `out` is None.

    Returns
    -------
    dict of str to torch.Tensor
        The tensors in the order of the file, each with a storage of exactly its size; with
        `out`, its tensors.

    Raises
    ------
    SafetensorError
        The file is not a valid safetensors file, lacks a name, or changes while it is read.
    MemoryError
        Not enough memory; nothing was read.
    OSError
        Reading failed; has errno and path.
    AttributeError
        This version of torch lacks a dtype; nothing was read.
    TypeError, ValueError
        `out` does not fit, or `mapped` is True with `out` or ``direct=True``; nothing was
        read.

    Notes
    -----
    Releases the GIL while it waits.

    Mapped tensors share one private map of the file, as those of safetensors do.  What is
    written to them stays in this process.  The map lives as long as one of them.  Pages
    that were not written show what others write to the file, and touching a page that the
    file no longer has, or that cannot be read, kills the process (SIGBUS).  A tensor whose
    address would not be a multiple of its element size is read instead.  With another
    `device` the tensors are copied from the map.

    Examples
    --------
    >>> import torch
    >>> tensors = {"weight": torch.arange(4), "bias": torch.zeros(4)}
    >>> nvmeio.safetensors.torch.save_file(tensors, "model.safetensors")
    >>> nvmeio.safetensors.torch.load_file("model.safetensors", names=["weight"])
    {'weight': tensor([0, 1, 2, 3])}
    """
    check_backend(backend)
    return _load_file(
        filename,
        Torch(device),
        names=names,
        out=out,
        progress=progress,
        direct=direct,
        mapped=mapped,
    )


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Write the state of a model; of tensors that share memory, only one is written.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    filename : str or os.PathLike
        The file to write.  An existing file is replaced atomically, and its mode is kept.
    metadata : dict of str to str, optional
        Metadata to store in the header.  For each tensor that is left out, the entry
        ``{left_out: written}`` is added, also to this dict.
    force_contiguous : bool, default True
        Copy tensors that are not contiguous.  With False they raise ValueError.

    Raises
    ------
    RuntimeError
        Among tensors that share memory, none covers all of it.
    ValueError, SafetensorError, OSError
        As ``save_file``.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> nvmeio.safetensors.torch.save_model(model, "model.safetensors")
    >>> sorted(nvmeio.safetensors.torch.load_file("model.safetensors"))
    ['bias', 'weight']
    """
    state = model.state_dict()
    for kept, others in _remove_duplicate_names(state).items():
        for other in others:
            metadata = {} if metadata is None else metadata
            metadata.setdefault(other, kept)
            del state[other]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(dict(state), filename, metadata=metadata)
    except ValueError as error:
        raise ValueError(
            f"{error} Or use save_model(..., force_contiguous=True), read the docs for "
            "potential caveats."
        ) from error


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: Literal["mmap", "pread"] = "mmap",
    mapped: Mapped = False,
) -> tuple[set[str], list[str]]:
    """Read the state of a model from a file that ``save_model`` wrote.

    Parameters
    ----------
    model : torch.nn.Module
        The model to load into.
    filename : str or os.PathLike
        The file to read.
    strict : bool, default True
        Raise RuntimeError if a tensor is missing or unexpected.
    device : str, int or torch.device, default "cpu"
        The device to read the tensors to, before they are copied to the model.
    backend : {"mmap", "pread"}, default "mmap"
        Accepted for compatibility, without effect; `mapped` decides.
    mapped : {False, True, "auto"}, default False
        Whether to copy to the model from a map of the file, which needs no memory for a
        second copy.  As for ``load_file``.

    Returns
    -------
    missing : set of str
        Names in the model that the file lacks.
    unexpected : list of str
        Names in the file that the model lacks.

    Raises
    ------
    RuntimeError
        `strict` is True, and a tensor is missing or unexpected; or as
        ``torch.nn.Module.load_state_dict``.
    SafetensorError, OSError
        As ``load_file``.

    Examples
    --------
    >>> import torch
    >>> model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    >>> nvmeio.safetensors.torch.save_model(model, "model.safetensors")
    >>> nvmeio.safetensors.torch.load_model(other, "model.safetensors")
    (set(), [])
    >>> torch.equal(model.weight, other.weight)
    True
    """
    state = load_file(filename, device=device, backend=backend, mapped=mapped)
    shared = _remove_duplicate_names(model.state_dict(), preferred_names=list(state))
    lacking, unexpected = model.load_state_dict(state, strict=False)
    missing = set(lacking)
    for others in shared.values():
        for other in others:
            if other in missing:
                missing.remove(other)
            else:
                unexpected.append(other)
    if strict and (missing or unexpected):
        words = f"Error(s) in loading state_dict for {type(model).__name__}:"
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in sorted(names))
                words += f"\n    {kind} key(s) in state_dict: {quoted}"
        raise RuntimeError(words)
    return missing, unexpected
