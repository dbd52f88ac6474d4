"""Copies of a state in memory of the pool, which goes back there after the save."""

from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager

from nvmeio._native.copy import memcpy
from nvmeio.torch.memory import empty

__all__ = ["PoolStager"]


class PoolStager(AsyncStager):  # type: ignore[misc]
    """What ``torch.distributed.checkpoint.async_save`` copies the state by.

    The copies lie in memory of nvmeio's pool, which is there already from the second save
    on: it goes back to the pool when a save is done with it, and the next one takes it
    again.  Two saves at a time take twice the memory, and never each other's.

    Notes
    -----
    What the pool may not give (NVMEIO_POOL_BYTES) is torch's own memory.  For
    ``AsyncCheckpointerType.PROCESS`` torch copies what is staged once more, into memory
    that both processes share.

    Examples
    --------
    >>> import torch
    >>> import nvmeio.torch.dcp
    >>> stager = nvmeio.torch.dcp.PoolStager()
    >>> staged = stager.stage({"weight": torch.arange(4)})
    >>> staged["weight"]
    tensor([0, 1, 2, 3])
    >>> stager.close()
    """

    def __init__(self) -> None:
        """Take no memory until there is something to copy."""

    # What stage() returns is complete.
    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        """Copy a state.

        Parameters
        ----------
        state_dict : dict
            Of any depth; tensors of any device, DTensor too.  Those that share memory do so
            in the copy.

        Returns
        -------
        dict
            The same, with every tensor on the CPU.
        """
        stager = _Copier()
        try:
            found = stager.stage(state_dict, non_blocking=stager.pins)
            for device in stager.devices:
                torch.cuda.synchronize(device)
            return found
        finally:
            stager.close()

    def synchronize_staging(self) -> None:
        """Do nothing: what is staged is complete."""

    def close(self) -> None:
        """Do nothing: the memory goes back by itself."""


class _Copier(StateDictStager):  # type: ignore[misc]
    """Torch's walk through a state, with other memory, which it does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.pins = torch.cuda.is_available()
        self.devices: set[torch.device] = set()

    def _offload_tensor(self, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        if type(x) is torch.Tensor and (x.is_conj() or x.is_neg()):
            # Torch's walk would copy what they are lazily made of.
            x = x.resolve_conj().resolve_neg()
            # The walk knows tensors by their ids.
            memo.setdefault(id(memo), []).append(x)
        return super()._offload_tensor(x, memo, non_blocking=non_blocking)

    def _stage_untyped_storage(
        self, storage: torch.UntypedStorage, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        nbytes = storage.nbytes()
        try:
            copy = empty(nbytes, dtype=torch.uint8, pin_memory=self.pins)
        except MemoryError:
            copy = torch.empty(nbytes, dtype=torch.uint8)
        found = copy.untyped_storage()
        if storage.device.type != "cpu":
            found.copy_(storage, non_blocking=non_blocking)
            if storage.device.type == "cuda":
                self.devices.add(storage.device)
        elif nbytes:
            source = torch.empty(0, dtype=torch.uint8).set_(storage)
            memcpy(copy, source)
        return found
