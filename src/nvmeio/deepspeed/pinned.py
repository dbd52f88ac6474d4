"""DeepSpeed's pin_memory op on the pool."""

from typing import Any

from nvmeio._arguments.checks import whole
from nvmeio._native import pool
from nvmeio._native.locked import free_locked, is_locked, new_locked

__all__ = ["pin_handle"]


class pin_handle:
    """Makes and frees tensors in pinned memory of the pool.

    Notes
    -----
    All handles are alike: each knows the tensors of every other, and of every
    ``aio_handle``.  Freeing makes a tensor ordinary memory, which goes back to the pool
    when its last view has died: nothing is left pointing at memory that is gone.

    References
    ----------
    DeepSpeed, ``csrc/pin_memory/py_ds_pin_memory.cpp``: the names and their order.

    Examples
    --------
    >>> import torch
    >>> handle = nvmeio.deepspeed.pin_handle()
    >>> tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    >>> tensor.shape, tensor.dtype
    (torch.Size([1000]), torch.float32)
    >>> handle.free_cpu_locked_tensor(tensor)
    True
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """Make a tensor in pinned memory.

        Parameters
        ----------
        num_elem : int
            How many elements, 0 or more.
        example_tensor : torch.Tensor or numpy.ndarray
            Gives the dtype, and whether a tensor or an array is made.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            One-dimensional, not initialized; page-aligned, populated, and locked where
            RLIMIT_MEMLOCK allows it.

        Raises
        ------
        MemoryError
            The system has not so much.
        TypeError
            ``example_tensor`` is no tensor, or ``num_elem`` is not an integer.
        ValueError
            ``num_elem`` is negative.
        """
        return new_locked(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: Any) -> bool:
        """Free what ``new_cpu_locked_tensor`` made.

        Parameters
        ----------
        locked_tensor : torch.Tensor or numpy.ndarray
            The tensor or a view that begins where it begins.

        Returns
        -------
        bool
            True the first time, then False; False for whatever is not ours.

        Raises
        ------
        ValueError
            A request in flight uses the memory.
        """
        return free_locked(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Free what ``new_cpu_locked_tensor`` made, by its address.

        Parameters
        ----------
        address : int
            As ``data_ptr()`` of the tensor gives it.

        Returns
        -------
        bool
            True the first time, then False; False for whatever is not ours.

        Raises
        ------
        TypeError
            ``address`` is not an integer.
        ValueError
            It is no address, or a request in flight uses the memory.
        """
        return pool.free_pinned(whole("address", address, 0, 2**64 - 1))

    def is_pinned(self, buffer: Any) -> bool:
        """Tell whether memory is pinned.

        Parameters
        ----------
        buffer : torch.Tensor or numpy.ndarray
            Any tensor; a slice of pinned memory is pinned.

        Returns
        -------
        bool
            True for what torch has pinned and for tensors of the pool that nobody freed.
        """
        return is_locked(buffer)
