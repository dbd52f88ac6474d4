"""DeepSpeed's pin_memory op, with memory of the pool."""

from typing import Any

from nvmeio._arguments.checks import whole
from nvmeio._native import pool
from nvmeio._native.pool import free_locked, is_locked, new_locked

__all__ = ["pin_handle"]


class pin_handle:
    """Allocates and frees tensors in pinned memory of the pool.

    Notes
    -----
    All handles share their tensors, with each other and with every ``aio_handle``.  A freed
    tensor is ordinary memory, which returns to the pool when its last view dies, so no view
    ever refers to memory that is gone.

    References
    ----------
    DeepSpeed, ``csrc/pin_memory/py_ds_pin_memory.cpp``: names and order of arguments.

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
        """Allocate a tensor in pinned memory.

        Parameters
        ----------
        num_elem : int
            The number of elements, 0 or more.
        example_tensor : torch.Tensor or numpy.ndarray
            Determines the dtype, and whether to make a tensor or an array.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            One-dimensional and not initialized.  Page-aligned, populated, and locked if
            RLIMIT_MEMLOCK permits.

        Raises
        ------
        MemoryError
            Not enough memory, or over the limit that ``NVMEIO_POOL_BYTES`` sets.
        TypeError
            ``example_tensor`` is not a tensor or array, or ``num_elem`` is not an integer.
        ValueError
            ``num_elem`` is negative.
        """
        return new_locked(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: Any) -> bool:
        """Free a tensor that ``new_cpu_locked_tensor`` made.

        Parameters
        ----------
        locked_tensor : torch.Tensor or numpy.ndarray
            The tensor, or a view that begins at its first byte.

        Returns
        -------
        bool
            True the first time, then False.  False for tensors that
            ``new_cpu_locked_tensor`` did not make.

        Raises
        ------
        ValueError
            A request in flight uses the memory.
        """
        return free_locked(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Free a tensor that ``new_cpu_locked_tensor`` made, by its address.

        Parameters
        ----------
        address : int
            The tensor's ``data_ptr()``.

        Returns
        -------
        bool
            True the first time, then False.  False for the address of any other memory.

        Raises
        ------
        TypeError
            ``address`` is not an integer.
        ValueError
            ``address`` is out of range, or a request in flight uses the memory.

        Examples
        --------
        >>> import torch
        >>> handle = nvmeio.deepspeed.pin_handle()
        >>> tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
        >>> handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
        True
        """
        return pool.free_pinned(whole("address", address, 0, 2**64 - 1))

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether memory is pinned.

        Parameters
        ----------
        buffer : torch.Tensor or numpy.ndarray
            Any tensor; a slice of pinned memory is pinned.

        Returns
        -------
        bool
            True for memory that torch pinned, and for tensors of ``new_cpu_locked_tensor``
            that were not freed.

        Examples
        --------
        >>> import torch
        >>> handle = nvmeio.deepspeed.pin_handle()
        >>> tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
        >>> handle.is_pinned(tensor[10:20]), handle.is_pinned(torch.ones(3))
        (True, False)
        """
        return is_locked(buffer)
