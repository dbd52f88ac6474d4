"""Model files as arrays: the names, arguments, results and errors of safetensors.numpy.

``import nvmeio.safetensors.numpy`` takes the place of ``import safetensors.numpy``.
"""

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvmeio.safetensors._dtypes import header_dtype, numpy_dtype
from nvmeio.safetensors._file import Direct
from nvmeio.safetensors._frameworks import NumPy
from nvmeio.safetensors._open import check_backend, safe_open
from nvmeio.safetensors._reading import Progress
from nvmeio.safetensors._specs import TensorSpec, deserialize, serialize, serialize_file
from nvmeio.safetensors._whole import load_file as _load_file
from nvmeio.safetensors._writing import Bytes, Source, pack
from nvmeio.safetensors._writing import save as _save

__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "safe_open",
    "save",
    "save_file",
    "serialize",
    "serialize_file",
]

Array = npt.NDArray[Any]

# Those who want to know how the format calls a dtype import it with its underscore.
_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "U64": np.uint64,
    "I32": np.int32,
    "U32": np.uint32,
    "I16": np.int16,
    "U16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": bool,
    "C64": np.complex64,
}


def _getdtype(dtype_str: str) -> Any:
    """Return numpy's dtype for one of the format."""
    return _TYPES[dtype_str]


def _is_little_endian(tensor: Array) -> bool:
    """Tell whether an array's bytes are in the order that files have them in."""
    order = tensor.dtype.byteorder
    return order in "<|" or (order == "=" and sys.byteorder == "little")


def _view2np(safeview: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Array]:
    """Return arrays over what deserialize() returned."""
    return {
        name: np.frombuffer(view["data"], numpy_dtype(view["dtype"])).reshape(view["shape"])
        for name, view in safeview
    }


def _sources(tensor_dict: Mapping[str, Array]) -> list[Source]:
    """Return what is to be written of arrays, in C order and in the order of files."""

    def contents(tensor: Array) -> Bytes:
        if not _is_little_endian(tensor):
            tensor = tensor.astype(tensor.dtype.newbyteorder("<"))
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)

    return [
        Source(
            name,
            header_dtype(tensor.dtype.name),
            tensor.shape,
            functools.partial(contents, tensor),
        )
        for name, tensor in tensor_dict.items()
    ]


def save(
    tensor_dict: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a file of arrays.

    Parameters
    ----------
    tensor_dict : dict of str to numpy.ndarray
        The arrays by name, of any strides and byte order.
    metadata : dict of str to str, optional
        Text that is kept with them.

    Returns
    -------
    bytes
        What ``save_file`` writes.

    Raises
    ------
    SafetensorError
        The format has no such dtype, or a name is reserved.
    TypeError
        A name or a text is no str.

    Examples
    --------
    >>> data = nvmeio.safetensors.numpy.save({"weight": np.arange(4)})
    >>> nvmeio.safetensors.numpy.load(data)
    {'weight': array([0, 1, 2, 3])}
    """
    return pack(_sources(tensor_dict), metadata)


def save_file(
    tensor_dict: Mapping[str, Array],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    align: Literal[8, 4096] = 8,
    sync: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write arrays to a file, which has its name when it is complete.

    Parameters
    ----------
    tensor_dict : dict of str to numpy.ndarray
        The arrays by name, of any strides and byte order.
    filename : str or os.PathLike
        The file.  One that exists is replaced, and keeps its mode.
    metadata : dict of str to str, optional
        Text that is kept with them.
    align : {8, 4096}, default 8
        With 8 the file is safetensors' own, to the byte.  With 4096 arrays of whole pages
        come first and begin at pages, which loads faster; every reader takes it.
    sync : bool, default True
        Return only when the file and its name are on the device.
    progress : callable, optional
        Is called with the bytes written so far and all there are.

    Raises
    ------
    SafetensorError, TypeError, ValueError
        As ``save``; `align` is neither.
    OSError
        With errno and path; ENOSPC says how much is needed.  The old file is as it was.

    Notes
    -----
    Memory of 32 MiB is used beside the arrays.  Releases the GIL.

    Examples
    --------
    >>> tensors = {"weight": np.arange(4)}
    >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors", {"by": "me"})
    >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
    ...     file.metadata()
    {'by': 'me'}
    """
    _save(
        _sources(tensor_dict), filename, metadata, align=align, sync=sync, progress=progress
    )


def load(data: bytes) -> dict[str, Array]:
    """Return the arrays of a file that is in memory.

    Parameters
    ----------
    data : bytes
        The contents of the file.

    Returns
    -------
    dict of str to numpy.ndarray
        In memory of their own.

    Raises
    ------
    SafetensorError
        It is no safetensors file.

    Examples
    --------
    >>> data = nvmeio.safetensors.numpy.save({"weight": np.arange(4)})
    >>> nvmeio.safetensors.numpy.load(data)
    {'weight': array([0, 1, 2, 3])}
    """
    return _view2np(deserialize(data))


def load_file(
    filename: str | os.PathLike[str],
    *,
    backend: Literal["mmap", "pread"] = "mmap",
    names: Iterable[str] | None = None,
    out: Mapping[str, Array] | None = None,
    progress: Progress | None = None,
    direct: Direct = "auto",
) -> dict[str, Array]:
    """Read the arrays of a file.

    Parameters
    ----------
    filename : str or os.PathLike
        The file.
    backend : {"mmap", "pread"}, default "mmap"
        Accepted, because safetensors has it; nothing is ever mapped.
    names : iterable of str, optional
        Those that are wanted; all by default.
    out : dict of str to numpy.ndarray, optional
        Arrays that are filled, of the right dtype and shape; then `names` is by default
        what it has.
    progress : callable, optional
        Is called with the bytes read so far and all there are.
    direct : {"auto", True, False}, default "auto"
        Whether to read past the page cache: where it has less than half of the file,
        always, or never.

    Returns
    -------
    dict of str to numpy.ndarray
        In the order of the file; each in memory of its own, or of `out`.

    Raises
    ------
    SafetensorError
        It is no safetensors file, lacks a name, or changes while it is read.
    MemoryError
        There is not so much memory; before anything is read.
    OSError
        With errno and path.
    TypeError, ValueError
        numpy has no such dtype, or `out` does not fit; before anything is read.

    Notes
    -----
    Releases the GIL while it waits.

    Examples
    --------
    >>> tensors = {"weight": np.arange(4), "bias": np.zeros(4)}
    >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors")
    >>> nvmeio.safetensors.numpy.load_file("model.safetensors", names=["weight"])
    {'weight': array([0, 1, 2, 3])}
    """
    check_backend(backend)
    return _load_file(
        filename, NumPy(), names=names, out=out, progress=progress, direct=direct
    )
