"""Copy tensors bit by bit, independent of dtype, subclass and autograd mode."""

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd.graph import increment_version

from nvmeio._tensors.memory import content_problem

__all__ = ["OPAQUE_DTYPES", "copy_bits", "is_memory", "is_plain"]
__all__ += ["opaque", "plain_mode", "touch"]

# By element size, a dtype that every copy kernel supports: copy_() lacks some narrow
# dtypes, and copying integers preserves the bits of every value.
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


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than elements in host memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not content_problem(tensor)
        and tensor.device.type == "cpu"
        and not (tensor.is_conj() or tensor.is_neg())
    )


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether bytes in C order can be read directly into a tensor."""
    return is_plain(tensor) and tensor.is_contiguous()


@contextlib.contextmanager
def plain_mode(tensor: torch.Tensor) -> Iterator[None]:
    """Ignore a tensor's class and the caller's inference mode.

    An inference tensor can be written to only in inference mode.  Views and versions of
    other tensors are tracked only outside it.  The caller may be in either mode.
    """
    with (
        torch._C.DisableTorchFunctionSubclass(),
        torch.inference_mode(tensor.is_inference()),
    ):
        yield


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all elements into ``target``, and increase its version as ``copy_`` does."""
    with plain_mode(target):
        opaque(target.detach()).copy_(opaque(source))


def touch(tensor: torch.Tensor) -> None:
    """Increase a tensor's version as ``copy_`` does, so that autograd notices a change."""
    try:
        increment_version(tensor)
    except RuntimeError:
        # Checked only after the error, because this runs after every small copy.
        if not tensor.is_inference():
            raise
