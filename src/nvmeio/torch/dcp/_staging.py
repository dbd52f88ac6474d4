"""Stage copies of a state in memory of the pool, which returns there after the save."""

import copy
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nvmeio._native.copy import memcpy
from nvmeio.torch.memory import empty

__all__ = ["PoolStager"]


class PoolStager(AsyncStager):  # type: ignore[misc]
    """A stager for ``torch.distributed.checkpoint.async_save``.

    It copies the state to memory of nvmeio's pool.  The memory returns to the pool when the
    save is done, and the next save uses it again.  Two saves at the same time need twice
    the memory, and do not disturb each other.

    Notes
    -----
    If the pool is at its limit (NVMEIO_POOL_BYTES), memory of torch is used.  With
    ``AsyncCheckpointerType.PROCESS``, torch copies the staged state once more, into memory
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
        """Allocate nothing until ``stage`` is called."""

    # The result of stage() is complete, so torch need not wait for it.
    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        """Copy a state.

        Parameters
        ----------
        state_dict : dict
            The state, nested to any depth, with tensors on any device and DTensors.

        Returns
        -------
        dict
            The copy, with every tensor on the CPU.  Tensors that share memory in the state
            also share memory in the copy.
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
        """Do nothing, because ``stage`` returns a complete copy."""

    def close(self) -> None:
        """Do nothing, because the memory returns to the pool when the copy dies."""


class _Copier(StateDictStager):  # type: ignore[misc]
    """Torch's stager, with memory of the pool, which it does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.pins = torch.cuda.is_available()
        self.devices: set[torch.device] = set()
        # By the ids of the originals, which are kept alive.  Torch 2.9 would copy a storage
        # for each of its tensors.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def close(self) -> None:
        """Forget the copies, whose memory is the caller's."""
        self._copies.clear()
        super().close()

    def _offload_tensor(self, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        if is_traceable_wrapper_subclass(x):
            # Its own storage has an address if it has an offset, but no bytes.
            return self._stage_parts(x, memo, non_blocking)
        if isinstance(x, ShardedTensor):
            # It has neither an address nor parts, but can be copied, to memory of torch.
            found = memo[id(x)] = copy.deepcopy(x)
            return found
        if isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()):
            # Torch would copy the storage, and lose the lazy conjugation or negation.
            x = x.detach().resolve_conj().resolve_neg()
            # Keep it alive, because torch identifies tensors by their ids.
            memo.setdefault(id(memo), []).append(x)
        return super()._offload_tensor(x, memo, non_blocking=non_blocking)

    def _stage_parts(self, x: Any, memo: Any, non_blocking: bool) -> Any:
        """Copy a tensor that consists of others, such as a DTensor."""
        names, context = x.__tensor_flatten__()
        parts = {
            name: self.deepcopy_with_tensor_offload(
                getattr(x, name), memo, non_blocking=non_blocking
            )
            for name in names
        }
        found = type(x).__tensor_unflatten__(parts, context, x.size(), x.stride())
        memo[id(x)] = found
        return found

    def _stage_untyped_storage(
        self, storage: torch.UntypedStorage, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        if id(storage) in self._copies:
            return self._copies[id(storage)][1]
        nbytes = storage.nbytes()
        try:
            copy = empty(nbytes, dtype=torch.uint8, pin_memory=self.pins)
        except MemoryError:
            copy = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        found = copy.untyped_storage()
        self._copies[id(storage)] = storage, found
        if nbytes and (storage.device.type != "cpu" or not storage.data_ptr()):
            # For a storage without memory, as of a ZeroTensor, torch raises an error.
            found.copy_(storage, non_blocking=non_blocking)
            if storage.device.type == "cuda":
                self.devices.add(storage.device)
        elif nbytes:
            source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            memcpy(copy, source)
        return found
