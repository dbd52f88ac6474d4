"""Read and write model files as numpy arrays.

The functions have the names, arguments, results and errors of ``safetensors.numpy``, so
that ``import nvmeio.safetensors.numpy`` can replace ``import safetensors.numpy``.
"""

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import refuse_masked
from nvmeio._safetensors.file import Direct, Mapped
from nvmeio._safetensors.writing import Source, pack
from nvmeio._safetensors.writing import save as _save
from nvmeio._streams.memory import Bytes
from nvmeio._streams.progress import Progress
from nvmeio._tensors.dtypes import header_dtype, numpy_dtype
from nvmeio._tensors.frameworks import NumPy
from nvmeio._tensors.memory import bytes_of
from nvmeio.safetensors._open import check_backend, safe_open
from nvmeio.safetensors._specs import TensorSpec, deserialize, serialize, serialize_file
from nvmeio.safetensors._whole import load_file as _load_file

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

# Private in safetensors too, but other libraries import it.
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
    """Return numpy's dtype for a dtype of the format."""
    return _TYPES[dtype_str]


def _is_little_endian(tensor: Array) -> bool:
    """Return whether an array is little-endian, as files are."""
    order = tensor.dtype.byteorder
    return order in "<|" or (order == "=" and sys.byteorder == "little")


def _view2np(safeview: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Array]:
    """Return arrays for the result of deserialize(), without copying."""
    return {
        name: np.frombuffer(view["data"], numpy_dtype(view["dtype"])).reshape(view["shape"])
        for name, view in safeview
    }


def _sources(tensor_dict: Mapping[str, Array]) -> list[Source]:
    """Return the arrays to write, which become little-endian and in C order."""
    for name, tensor in tensor_dict.items():
        refuse_masked(repr(name), tensor)

    def contents(tensor: Array) -> Bytes:
        if not _is_little_endian(tensor):
            tensor = tensor.astype(tensor.dtype.newbyteorder("<"))
        return bytes_of(np.asarray(tensor))

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
    """Return the bytes of a safetensors file with these arrays.

    Parameters
    ----------
    tensor_dict : dict of str to numpy.ndarray
        The arrays by name, with any strides and byte order.
    metadata : dict of str to str, optional
        Metadata to store in the header.

    Returns
    -------
    bytes
        The bytes that ``save_file`` would write.

    Raises
    ------
    SafetensorError
        The format lacks a dtype, or a name is reserved.
    TypeError
        A name, or a key or value of `metadata`, is not a str.

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
    atomic: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write arrays to a file, which gets its name when it is complete.

    Parameters
    ----------
    tensor_dict : dict of str to numpy.ndarray
        The arrays by name, with any strides and byte order.
    filename : str or os.PathLike
        The file to write.  An existing file is replaced atomically, and its mode is kept.
    metadata : dict of str to str, optional
        Metadata to store in the header.
    align : {8, 4096}, default 8
        With 8, the file is the same as that of safetensors, byte for byte.  With 4096,
        arrays of whole pages come first and begin at page boundaries, which makes loading
        faster; every reader accepts such files.
    sync : bool, default True
        Sync the file before it gets its name, and return only when both are on the device.
        With False nothing is synced, and a power failure may leave an incomplete file.
    atomic : bool, default True
        With False an existing file is written in place, for file systems that cannot rename
        files; after an error it is incomplete.  Arrays that are mapped from the file are
        copied first.
    progress : callable, optional
        Called during the write with two ints: bytes written so far, and bytes in total.

    Raises
    ------
    SafetensorError, TypeError
        As ``save``.
    ValueError
        `align` is neither 8 nor 4096.
    OSError
        Writing failed; has errno and path.  The message for ENOSPC says how many bytes are
        needed and free.  The old file is unchanged, with `atomic`.

    Notes
    -----
    Uses 32 MiB of memory besides the arrays.  Releases the GIL.

    Examples
    --------
    >>> tensors = {"weight": np.arange(4)}
    >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors", {"by": "me"})
    >>> with nvmeio.safetensors.safe_open("model.safetensors", "np") as file:
    ...     file.metadata()
    {'by': 'me'}
    """
    options: Any = {"align": align, "sync": sync, "atomic": atomic}
    _save(_sources(tensor_dict), filename, metadata, progress=progress, **options)


def load(data: bytes) -> dict[str, Array]:
    """Return the arrays of a safetensors file in memory.

    Parameters
    ----------
    data : bytes
        The contents of the file.

    Returns
    -------
    dict of str to numpy.ndarray
        The arrays by name, copied from `data`.

    Raises
    ------
    SafetensorError
        The bytes are not a valid safetensors file.

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
    mapped: Mapped = False,
) -> dict[str, Array]:
    """Read the arrays of a file.

    Parameters
    ----------
    filename : str or os.PathLike
        The file to read.
    backend : {"mmap", "pread"}, default "mmap"
        Accepted for compatibility, without effect; `mapped` decides.
    names : iterable of str, optional
        The arrays to read; by default all, or those of `out`.
    out : dict of str to numpy.ndarray, optional
        Arrays to read into, of the same dtypes and shapes as in the file.
    progress : callable, optional
        Called during the read with two ints: bytes read so far, and bytes in total.
    direct : {"auto", True, False}, default "auto"
        Whether to bypass the page cache.  "auto": for what it does not have.  True:
        always, which fails if the file system lacks O_DIRECT.  False: never.
    mapped : {False, True, "auto"}, default False
        Whether to map the file instead of reading it; see Notes.  "auto": if the page cache
        has all of it, `direct` is not True and `out` is None.

    Returns
    -------
    dict of str to numpy.ndarray
        The arrays in the order of the file, each in its own memory; with `out`, its arrays.

    Raises
    ------
    SafetensorError
        The file is not a valid safetensors file, lacks a name, or changes while it is read.
    MemoryError
        Not enough memory; nothing was read.
    OSError
        Reading failed; has errno and path.
    AttributeError
        numpy lacks a dtype (float8, float4); nothing was read.
    TypeError, ValueError
        `out` does not fit, `mapped` is True with `out` or ``direct=True``, or numpy lacks
        bfloat16, which needs ml_dtypes; nothing was read.

    Notes
    -----
    Releases the GIL while it waits.  Mapped arrays are writable, and behave as the mapped
    tensors of ``nvmeio.safetensors.torch.load_file``.

    Examples
    --------
    >>> tensors = {"weight": np.arange(4), "bias": np.zeros(4)}
    >>> nvmeio.safetensors.numpy.save_file(tensors, "model.safetensors")
    >>> nvmeio.safetensors.numpy.load_file("model.safetensors", names=["weight"])
    {'weight': array([0, 1, 2, 3])}
    """
    check_backend(backend)
    return _load_file(
        filename,
        NumPy(),
        names=names,
        out=out,
        progress=progress,
        direct=direct,
        mapped=mapped,
    )
