"""Memory of the pool as torch tensors, registered with CUDA."""

import torch

from nvmeio._events.log import log
from nvmeio._native import pool

__all__ = ["announce", "tensor_in"]


def tensor_in(memory: pool.PoolMemory, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor over all of a piece of the pool's memory."""
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def announce(memory: pool.PoolMemory) -> None:
    """Register memory with the CUDA driver as pinned, if there is one.

    If the driver refuses or cannot be called, as in a forked child of a process that used
    it, log a warning.  Copies are then correct, but synchronous.
    """
    if not torch.cuda.is_available():
        return
    try:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.address, memory.nbytes, 0))
    except RuntimeError as error:
        log.warning("pinned memory could not be registered with CUDA: %s", error)
        return
    if code:
        log.warning("cudaHostRegister refused %d bytes: error %d", memory.nbytes, code)
        return
    memory.call_before_free(runtime.cudaHostUnregister)
