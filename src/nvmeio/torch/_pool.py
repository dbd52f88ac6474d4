"""Memory of the pool as torch and its drivers see it."""

import logging

import torch

from nvmeio._native import pool

__all__ = ["announce", "tensor_in"]

_log = logging.getLogger("nvmeio")


def tensor_in(memory: pool.PoolMemory, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of all of some memory."""
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def announce(memory: pool.PoolMemory) -> None:
    """Tell CUDA's driver, where there is one, of memory that stays where it is.

    Where the driver refuses, or cannot be asked, as in a child of a process that used it,
    copies are right, but synchronous; it is logged.
    """
    if not torch.cuda.is_available():
        return
    try:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.address, memory.nbytes, 0))
    except RuntimeError as error:
        _log.warning("CUDA cannot be told of pinned memory: %s", error)
        return
    if code:
        _log.warning("cudaHostRegister refused %d bytes: error %d", memory.nbytes, code)
        return
    memory.call_before_free(runtime.cudaHostUnregister)
