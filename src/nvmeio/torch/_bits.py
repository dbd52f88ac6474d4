"""Copies from tensor to tensor that change no bit, whatever the dtypes and modes."""

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd.graph import increment_version

__all__ = ["OPAQUE_DTYPES", "copy_bits", "opaque", "plain_mode", "touch"]

# A dtype of the same width that every copy kernel knows: copy_() lacks some of the narrow
# ones, and through integers the bits of every value pass unchanged.
OPAQUE_DTYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def opaque(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements of a tensor as bits."""
    return tensor.view(OPAQUE_DTYPES[tensor.element_size()])


@contextlib.contextmanager
def plain_mode(tensor: torch.Tensor) -> Iterator[None]:
    """Handle a tensor as what it is, whatever its class and the caller's modes.

    An inference tensor may be written to in inference mode alone, and views and versions of
    any other are tracked outside of it alone; the caller may be in either.
    """
    with (
        torch._C.DisableTorchFunctionSubclass(),
        torch.inference_mode(tensor.is_inference()),
    ):
        yield


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all elements into ``target``, and count the change as ``copy_`` does."""
    with plain_mode(target):
        opaque(target.detach()).copy_(opaque(source))


def touch(tensor: torch.Tensor) -> None:
    """Count a change of a tensor's values, as ``copy_`` does, for autograd to notice."""
    try:
        increment_version(tensor)
    except RuntimeError:
        # Asked only now, for this runs after each small copy.
        if not tensor.is_inference():
            raise
