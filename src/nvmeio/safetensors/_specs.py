"""The functions of safetensors without a framework: TensorSpec, serialize and the like."""

import builtins
import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nvmeio._safetensors.header import (
    LENGTH_BYTES,
    RefusedError,
    check_size,
    header_bytes,
    parse,
)
from nvmeio._safetensors.writing import Source, pack, save
from nvmeio._streams.memory import Bytes
from nvmeio._tensors.dtypes import header_dtype, header_shape
from nvmeio._tensors.errors import SafetensorError

__all__ = ["TensorSpec", "deserialize", "serialize", "serialize_file"]

_CONTEXT = "Error while deserializing"


class TensorSpec:
    """Describe memory to be written as a tensor.

    Parameters
    ----------
    dtype : str
        The name of the dtype in numpy or torch, such as "float32".
    shape : sequence of int
        The shape in numpy or torch.  The attribute `shape` is that of the header; they
        differ for F4, where the header counts elements and torch counts pairs.
    data_ptr : int
        The address of the memory, which must stay valid while it is written.
    data_len : int
        The size of the memory in bytes.

    Raises
    ------
    SafetensorError
        The format lacks the dtype.
    OverflowError
        A number is negative.

    Examples
    --------
    >>> array = np.arange(4, dtype=np.float32)
    >>> spec = nvmeio.safetensors.TensorSpec(
    ...     dtype="float32", shape=[4], data_ptr=array.ctypes.data, data_len=array.nbytes
    ... )
    >>> nvmeio.safetensors.serialize_file({"weight": spec}, "model.safetensors")
    """

    def __init__(
        self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int
    ) -> None:
        self._dtype = header_dtype(dtype)
        extents = [int(extent) for extent in shape]
        for number in (*extents, data_ptr, data_len):
            if number < 0:
                raise OverflowError("can't convert negative int to unsigned")
        self._shape = list(header_shape(self._dtype, extents))
        self._data_ptr, self._data_len = data_ptr, data_len

    @property
    def dtype(self) -> str:
        """The dtype, as in the header."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape, as in the header."""
        return self._shape

    @property
    def data_ptr(self) -> int:
        """The address of the memory."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The size of the memory in bytes."""
        return self._data_len

    def __repr__(self) -> str:
        """Return the spec as a Python expression."""
        return (
            f"TensorSpec(dtype='{self._dtype}', shape={self._shape}, "
            f"data_ptr={self._data_ptr}, data_len={self._data_len})"
        )


def _is_spec(spec: Any) -> bool:
    """Return whether this is a TensorSpec of nvmeio or of safetensors."""
    return isinstance(spec, TensorSpec) or (
        type(spec).__name__ == "TensorSpec" and hasattr(spec, "data_ptr")
    )


def _contents(spec: TensorSpec) -> Bytes:
    """Return the memory of a spec; an empty one may have any address."""
    if not spec.data_len:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_ubyte * spec.data_len).from_address(spec.data_ptr)
    found: Bytes = np.frombuffer(memory, np.uint8)
    return found


def _sources(tensor_dict: Mapping[str, TensorSpec]) -> list[Source]:
    """Return the tensors to write, checked as safetensors does."""
    if not isinstance(tensor_dict, dict):
        kind = type(tensor_dict).__name__
        raise TypeError(
            f"argument 'tensor_dict': '{kind}' object is not an instance of 'dict'"
        )
    for name, spec in tensor_dict.items():
        if not isinstance(name, str) or not _is_spec(spec):
            wanted, other = (
                ("str", name) if not isinstance(name, str) else ("TensorSpec", spec)
            )
            kind = type(other).__name__
            raise TypeError(
                f"argument 'tensor_dict': '{kind}' object is not an instance of '{wanted}'"
            )
        try:
            size = check_size(spec.dtype, spec.shape)
        except RefusedError as error:
            raise SafetensorError(f"Error while serializing: {error}") from None
        if size != spec.data_len:
            raise SafetensorError(
                "Error while serializing: invalid shape, data type, or offset for tensor"
            )
    return [
        Source(name, spec.dtype, spec.shape, functools.partial(_contents, spec))
        for name, spec in tensor_dict.items()
    ]


def serialize(
    tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a safetensors file with these tensors.

    Parameters
    ----------
    tensor_dict : dict of str to TensorSpec
        The tensors by name.
    metadata : dict of str to str, optional
        Metadata to store in the header.

    Returns
    -------
    bytes
        The bytes that ``serialize_file`` would write.

    Raises
    ------
    SafetensorError
        A shape does not match its size in bytes, or a name is reserved.
    TypeError
        An argument is of the wrong type.

    Examples
    --------
    >>> array = np.arange(4, dtype=np.float32)
    >>> spec = nvmeio.safetensors.TensorSpec(
    ...     dtype="float32", shape=[4], data_ptr=array.ctypes.data, data_len=array.nbytes
    ... )
    >>> data = nvmeio.safetensors.serialize({"weight": spec})
    >>> nvmeio.safetensors.numpy.load(data)
    {'weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    return pack(_sources(tensor_dict), metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file, as ``nvmeio.safetensors.numpy.save_file`` does.

    Parameters
    ----------
    tensor_dict : dict of str to TensorSpec
        The tensors by name.
    filename : str or os.PathLike
        The file to write.  An existing file is replaced atomically.
    metadata : dict of str to str, optional
        Metadata to store in the header.

    Raises
    ------
    SafetensorError, TypeError
        As ``serialize``.
    OSError
        Writing failed; has errno and path.  The old file is unchanged.

    Examples
    --------
    >>> array = np.arange(4, dtype=np.float32)
    >>> spec = nvmeio.safetensors.TensorSpec(
    ...     dtype="float32", shape=[4], data_ptr=array.ctypes.data, data_len=array.nbytes
    ... )
    >>> nvmeio.safetensors.serialize_file({"weight": spec}, "model.safetensors")
    >>> nvmeio.safetensors.numpy.load_file("model.safetensors")
    {'weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    save(_sources(tensor_dict), filename, metadata)


def deserialize(bytes: builtins.bytes) -> list[tuple[str, dict[str, Any]]]:  # noqa: A002
    """Return the tensors of a safetensors file in memory.

    Parameters
    ----------
    bytes : bytes
        The contents of the file.

    Returns
    -------
    list of tuple of str and dict
        The name of each tensor, and a dict: "dtype" as in the header, "shape", and "data",
        a bytearray.

    Raises
    ------
    SafetensorError
        The bytes are not a valid safetensors file.
    TypeError
        The argument is not bytes.

    Examples
    --------
    >>> data = nvmeio.safetensors.numpy.save({"weight": np.arange(4)})
    >>> [(name, tensor)] = nvmeio.safetensors.deserialize(data)
    >>> name, tensor["dtype"], tensor["shape"], len(tensor["data"])
    ('weight', 'I64', [4], 32)
    """
    if not isinstance(bytes, builtins.bytes):
        kind = type(bytes).__name__
        raise TypeError(f"argument 'bytes': '{kind}' object is not an instance of 'bytes'")
    length = header_bytes(bytes[:LENGTH_BYTES], len(bytes), context=_CONTEXT)
    header = bytes[LENGTH_BYTES : LENGTH_BYTES + length]
    layout = parse(header, len(bytes), context=_CONTEXT)
    data = memoryview(bytes)[layout.data_start :]
    return [
        (
            tensor.name,
            {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "data": bytearray(data[tensor.begin : tensor.end]),
            },
        )
        for tensor in layout.tensors
    ]
