"""Check the names of a load, and the arrays and tensors that it reads into."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nvmeio._arguments.checks import shown
from nvmeio._tensors.dtypes import torch_module

__all__ = ["check_target", "chosen_names"]


def chosen_names(
    names: Iterable[str] | None, out: Mapping[str, Any] | None
) -> list[str] | None:
    """Return the names to load, each once; by default those of `out`, or None for all."""
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise TypeError(f"names is {names!r}; it must be an iterable of names, or None")
    if not isinstance(out, Mapping | None):
        raise TypeError(f"out is {shown(out)}; it must be a dict of tensors, or None")
    if names is None:
        return None if out is None else list(out)
    return list(dict.fromkeys(names))


def check_target(
    name: str,
    target: Any,
    by_torch: bool,
    dtype: Any,
    shape: tuple[int, ...],
    source: str = "file",
) -> None:
    """Raise TypeError or ValueError if a tensor or an array cannot be read into a target.

    ``name`` is the target's in the message, ``source`` what has the tensor or array.
    """
    if not isinstance(target, torch_module().Tensor if by_torch else np.ndarray):
        raise TypeError(
            f"{name} is of type {type(target).__qualname__}; the {source} has "
            f"{'a tensor' if by_torch else 'an array'}"
        )
    if target.dtype != dtype or tuple(target.shape) != tuple(shape):
        raise ValueError(
            f"{name} has the dtype {target.dtype} and shape {list(target.shape)}; the "
            f"{source} has {dtype} and {list(shape)}"
        )
    if problem := _problem(target):
        raise ValueError(f"{name} {problem}")


def _problem(target: Any) -> str:
    """Return why a tensor or an array cannot be written to; "" if it can."""
    if isinstance(target, np.ndarray):
        strides = target.strides
        if not target.flags.writeable:
            return "is read-only; pass a writable array"
    elif target.is_meta or target.layout != torch_module().strided:
        return f"has no memory to fill: {target.device}, {target.layout}"
    elif target.is_conj() or target.is_neg():
        return "is a conjugate or negative view; pass its resolve_conj() or resolve_neg()"
    else:
        strides = target.stride()
    extents = zip(target.shape, strides, strict=True)
    if 0 not in target.shape and any(n > 1 and not stride for n, stride in extents):
        return "is expanded, so several elements share memory; pass its clone() or copy()"
    return ""
