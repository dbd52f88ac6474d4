"""Memory that is measured with, of the kinds that programs have."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from nvmeio.cli.arguments import CommandError
from nvmeio.memory import empty

__all__ = ["KINDS", "Buffers"]

KINDS = ("pool", "numpy", "torch", "fresh")

# glibc serves what is at least this large from memory that was never used before
# (mallopt(3), M_MMAP_THRESHOLD); for less it may use what was freed.
FRESH_BYTES_MIN = 64 << 20


class Buffers:
    """Makes buffers of one kind.

    Parameters
    ----------
    kind : {"pool", "numpy", "torch", "fresh"}
        Memory of nvmeio's pool; as numpy or torch allocate it, every page touched; or
        as numpy allocates it, never touched.

    Raises
    ------
    CommandError
        torch is wanted and not installed.
    """

    def __init__(self, kind: str) -> None:
        if kind == "torch" and find_spec("torch") is None:
            raise CommandError("--memory torch needs torch, which is not installed")
        self.kind = kind

    def make(self, nbytes: int) -> Any:
        """Make a buffer.

        Parameters
        ----------
        nbytes : int
            How large.

        Returns
        -------
        array or tensor
            Of bytes, in one dimension.
        """
        make: dict[str, Callable[[int], Any]] = {
            "pool": lambda n: empty(n, np.uint8),
            "numpy": _touched_array,
            "torch": _touched_tensor,
            "fresh": lambda n: np.empty(max(n, FRESH_BYTES_MIN), np.uint8)[:n],
        }
        return make[self.kind](nbytes)

    def again(self, buffer: Any) -> Any:
        """Return what the next transfer uses in place of a buffer: itself, unless fresh.

        Parameters
        ----------
        buffer : array or tensor
            That was used.

        Returns
        -------
        array or tensor
            Of the same size.
        """
        return self.make(buffer.nbytes) if self.kind == "fresh" else buffer


def _touched_array(nbytes: int) -> Any:
    array = np.empty(nbytes, np.uint8)
    # np.zeros() would not touch it.
    array.fill(0)
    return array


def _touched_tensor(nbytes: int) -> Any:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8).fill_(0)
