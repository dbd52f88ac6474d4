"""Embeddings whose tables stay on a drive."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nvmeio._arguments.types import Path
from nvmeio._arguments.units import size_of
from nvmeio.torch._weights.rows import Rows
from nvmeio.torch._weights.source import check_dtype, open_checkpoint, stacked
from nvmeio.torch._weights.store import Store, Weight
from nvmeio.torch._weights.tensor import DiskParameter

__all__ = ["DiskEmbedding"]


class DiskEmbedding(nn.Module):  # type: ignore[misc]  # torch is Any here
    """An embedding whose table stays in its files, and whose rows are read when used.

    For tables that are larger than memory, of which each call uses few rows, such as those
    of n-grams.  The rows that a call needs are read at once, each of them once; those that
    were used last stay in memory.

    Parameters
    ----------
    checkpoint : str, bytes or os.PathLike
        A safetensors file, an index of several, or a folder with one of these.
    names : str or sequence of str
        The name of the table, of shape (rows, columns), or the names of its parts, one
        below the other.  In a name, ``*`` stands for the numbers of all parts.
    scales : str or sequence of str, optional
        Names, likewise, of factors for the values, of shape (rows,) or (rows, n): one for
        each row, or for each n-th part of a row.
    memory : int or str, optional
        The limit in bytes for rows that were used or prefetched.  The rows of a call come
        on top of it.
    dtype : torch.dtype, optional
        The dtype of results; by default as stored, with `scales` float32.

    Attributes
    ----------
    num_embeddings, embedding_dim : int
        The numbers of rows and columns.
    weight : torch.nn.Parameter
        The table, with shape and dtype; as a whole it cannot be used.

    Raises
    ------
    OSError, SafetensorError
        The checkpoint cannot be opened, or is invalid.  From a call: rows cannot be read,
        or the file was changed since.
    TypeError, ValueError
        An argument is of the wrong type; the checkpoint lacks a name; or the parts have
        several dtypes or widths.

    See Also
    --------
    disk_offload : Leave the weights of a model on the drive, and of embeddings the rows.

    Examples
    --------
    >>> import torch
    >>> import nvmeio.safetensors.torch
    >>> parts = {f"table.{number}": torch.rand(1000, 8) for number in range(3)}
    >>> nvmeio.safetensors.torch.save_file(parts, "table.safetensors")
    >>> table = nvmeio.torch.DiskEmbedding("table.safetensors", "table.*", memory="1MiB")
    >>> table
    DiskEmbedding(3000, 8, dtype=torch.float32)
    >>> torch.equal(table(torch.tensor([2500])), parts["table.2"][[500]])
    True
    """

    def __init__(
        self,
        checkpoint: Path,
        names: str | Sequence[str],
        *,
        scales: str | Sequence[str] | None = None,
        memory: int | str = "256MiB",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        limit = size_of("memory", memory, 0)
        check_dtype(dtype)
        if scales is not None and dtype is None:
            dtype = torch.float32
        with open_checkpoint(checkpoint) as source:
            table = stacked(source, names, dtype)
            factors = None if scales is None else stacked(source, scales, None)
            if len(table.shape) != 2:
                raise ValueError(
                    f"{table.name} has the shape {tuple(table.shape)}; it must be (rows, "
                    "columns)"
                )
            if factors is not None:
                _check_scales(table, factors)
            table.is_table = True
            self._table = Rows(table, limit, factors, prefetches=True)
            weight = DiskParameter.of(table, Store([table], [], 0), self._table)
        weakref.finalize(self._table, source.close).atexit = False
        self._weight = (weight,)
        self.num_embeddings, self.embedding_dim = table.shape

    @property
    def weight(self) -> DiskParameter:
        """The table; no parameter of the module, because it cannot be saved as a whole."""
        return self._weight[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the table.

        Parameters
        ----------
        ids : torch.Tensor
            Numbers of rows, int64 or int32, of any shape.

        Returns
        -------
        torch.Tensor
            Of the shape of `ids` and one more dimension of ``embedding_dim``.

        Raises
        ------
        IndexError
            A number is negative, or not less than ``num_embeddings``.
        TypeError
            `ids` is no tensor of int64 or int32.
        """
        return self._table.read(ids)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to read rows that a later call needs.

        Rows for which `memory` has no room are read by that call.

        Parameters
        ----------
        ids : torch.Tensor
            Numbers of rows, as of a call.

        Raises
        ------
        IndexError, TypeError
            As of a call.

        Examples
        --------
        >>> import torch
        >>> import nvmeio.safetensors.torch
        >>> table = {"table": torch.arange(40.0).view(10, 4)}
        >>> nvmeio.safetensors.torch.save_file(table, "table.safetensors")
        >>> table = nvmeio.torch.DiskEmbedding("table.safetensors", "table")
        >>> table.prefetch(torch.tensor([3, 5]))
        >>> table(torch.tensor(5))
        tensor([20., 21., 22., 23.])
        """
        self._table.prefetch(ids)

    def stats(self) -> dict[str, int]:
        """Return what was read.

        Returns
        -------
        dict of str to int
            ``hits``, rows that were in memory or prefetched; ``misses``, rows that a call
            has waited for; ``bytes_read``; and ``bytes_used``, the memory for rows.

        Examples
        --------
        >>> import torch
        >>> import nvmeio.safetensors.torch
        >>> table = {"table": torch.zeros(10, 4)}
        >>> nvmeio.safetensors.torch.save_file(table, "table.safetensors")
        >>> table = nvmeio.torch.DiskEmbedding("table.safetensors", "table")
        >>> rows = table(torch.tensor([3, 5, 3]))
        >>> table.stats()["misses"]
        2
        """
        return dict(self._table.stats())

    def extra_repr(self) -> str:
        """Return what ``print`` says of it."""
        rows, columns = self.num_embeddings, self.embedding_dim
        return f"{rows}, {columns}, dtype={self.weight.dtype}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "DiskEmbedding":
        # It never changes.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an embedding on a drive cannot be pickled; open it again there")


def _check_scales(table: Weight, scales: Weight) -> None:
    rows, columns = table.shape
    fits = 1 <= len(scales.shape) <= 2 and scales.shape[0] == rows
    if not fits or columns % (scales.shape[1:].numel() or 1):
        raise ValueError(
            f"scales have the shape {tuple(scales.shape)}; for a table of "
            f"{tuple(table.shape)} it must be ({rows},), or ({rows}, n) where n divides "
            f"{columns}"
        )
