"""Find tensors that share memory, and choose which of them to save.

The functions have the names of safetensors' own, with underscores, because other libraries
import them.
"""

from collections.abc import Iterable, Mapping

import torch

__all__ = ["storage_ptr", "storage_size"]


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none.

    Parameters
    ----------
    tensor : torch.Tensor
        Any tensor.

    Returns
    -------
    int
        The address.

    Examples
    --------
    >>> import torch
    >>> tensor = torch.arange(4)
    >>> nvmeio.safetensors.torch.storage_ptr(tensor[1:]) == tensor.data_ptr()
    True
    """
    try:
        return int(tensor.untyped_storage().data_ptr())
    except Exception:  # a subclass may raise any type
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's storage in bytes.

    Parameters
    ----------
    tensor : torch.Tensor
        Any tensor.

    Returns
    -------
    int
        The size; for a tensor without storage, the size of its elements.

    Examples
    --------
    >>> import torch
    >>> tensor = torch.arange(4)
    >>> nvmeio.safetensors.torch.storage_size(tensor[1:])
    32
    """
    try:
        return int(tensor.untyped_storage().nbytes())
    except Exception:  # a subclass may raise any type
        return int(tensor.nelement() * tensor.element_size())


def _end_ptr(tensor: torch.Tensor) -> int:
    """Return the address where a contiguous tensor ends."""
    if not tensor.nelement():
        return int(tensor.data_ptr())
    return int(tensor.view(-1)[-1].data_ptr() + tensor.element_size())


def _is_complete(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers all of its storage."""
    nbytes = tensor.nelement() * tensor.element_size()
    return (storage_ptr(tensor), storage_size(tensor)) == (tensor.data_ptr(), nbytes)


def _filter_shared_not_shared(
    tensors: Iterable[set[str]], state_dict: Mapping[str, torch.Tensor]
) -> list[set[str]]:
    """Split groups of tensors of one storage into groups that overlap in memory."""
    found: list[set[str]] = []
    for names in tensors:
        if len(names) < 2:
            found.append(names)
            continue
        areas = sorted(
            (state_dict[name].data_ptr(), _end_ptr(state_dict[name]), name)
            for name in names
        )
        before = None
        for start, stop, name in areas:
            if before is None or start >= before:
                found.append(set())
            found[-1].add(name)
            before = stop
    return found


def _find_shared_tensors(state_dict: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Return sets of names of tensors that share memory; also sets of a single name."""
    storages: dict[tuple[torch.device, int, int], set[str]] = {}
    for name, tensor in state_dict.items():
        address, nbytes = storage_ptr(tensor), storage_size(tensor)
        if tensor.device.type != "meta" and address and nbytes:
            storages.setdefault((tensor.device, address, nbytes), set()).add(name)
    return _filter_shared_not_shared(storages.values(), state_dict)


def _remove_duplicate_names(
    state_dict: Mapping[str, torch.Tensor],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """Return the names to leave out, by the name to keep, whose memory they share."""
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    left_out: dict[str, list[str]] = {}
    for shared in _find_shared_tensors(state_dict):
        complete = {name for name in shared if _is_complete(state_dict[name])}
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found "
                f"no suitable name to keep for saving amongst: {shared}. None is covering "
                "the entire storage.Refusing to save/load the model since you could be "
                "storing much more memory than needed. Please refer to "
                "https://huggingface.co/docs/safetensors/torch_shared_tensors for more "
                "information. Or open an issue."
            )
        kept = min(complete & preferred or complete - discarded or complete)
        for name in sorted(shared - {kept}):
            left_out.setdefault(kept, []).append(name)
    return left_out
