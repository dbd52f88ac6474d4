"""The tensor libraries that nvmeio supports, found by the types of their tensors.

nvmeio.torch registers itself here when it is loaded.  The package registers the function
that loads it, when the first torch object arrives, because this module must not import it.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "Export",
    "TensorLibrary",
    "libraries",
    "library_of",
    "library_of_dtype",
    "register",
    "register_loader",
    "thread_limit",
]


class Export(NamedTuple):
    """The memory of a tensor that the engine uses."""

    address: int  # of `nbytes` bytes in C order; 0 for a tensor on a device
    nbytes: int
    origin: int  # address in the caller's own memory; 0 for a tensor on a device
    owner: object  # keeps the memory at `address` alive
    # Called with the tensor once a read has filled the memory.
    landing: Callable[[Any], None] | None = None
    stage: object = None  # copies a tensor on a device piece by piece
    # The tensor's own, with data_ptr(), if the tensor is used until the request is done.
    storage: Any = None


class TensorLibrary(Protocol):
    """The functions of a tensor library; nvmeio.torch._tensors documents them."""

    # The types of tensors whose methods run no code of others.
    PLAIN_TYPES: tuple[type, ...]

    def export(self, tensor: Any, writable: bool) -> Export:
        """Export the memory of a tensor, or a copy; raise if it has none."""

    def touch(self, tensor: Any) -> None:
        """Record that a tensor's values changed."""

    def locked_tensor(self, num_elem: int, example: Any) -> Any:
        """Make a tensor in locked memory of the pool."""

    def first_address(self, tensor: Any) -> int:
        """Return the address of a tensor's first element; 0 if it has no memory."""

    def is_pinned(self, tensor: Any) -> bool:
        """Return whether a tensor is in pinned memory."""

    def copy(self, dest: Any, src: Any) -> None:
        """Copy the elements of a tensor into another of the same dtype and count."""

    def host_like(self, tensor: Any) -> Any:
        """Make a tensor of the same size and dtype in host memory."""

    def byte_view(self, tensor: Any) -> Any:
        """View the bytes of a tensor: flat, or with another axis for each element's."""

    def announce(self, memory: Any) -> None:
        """Register new pinned memory of the pool with the device drivers."""

    def thread_limit(self) -> int:
        """Return how many threads the library would use."""

    def carrier(self, dtype: Any) -> np.dtype[Any] | None:
        """Return the numpy dtype that holds elements of a dtype; None if not its own."""

    def to_tensor(self, array: npt.NDArray[Any], dtype: Any) -> Any:
        """View an array of carriers as a tensor, sharing memory."""

    def to_carrier(self, values: Any, dtype: Any) -> npt.NDArray[Any]:
        """Convert values, as a tensor would accept them, to an array of carriers."""


# The type of each library's tensors, and the library.  Entries are never removed.
libraries: list[tuple[type, TensorLibrary]] = []

_loaders: dict[str, Callable[[], object]] = {}


def register(kind: type, library: TensorLibrary) -> None:
    """Register a tensor library until the process ends."""
    libraries.append((kind, library))


def register_loader(package: str, load: Callable[[], object]) -> None:
    """Register the function that loads support for a package's tensors."""
    _loaders[package] = load


def library_of(source: object) -> TensorLibrary | None:
    """Return the library that a tensor belongs to; None for other objects."""
    found = _registered(source)
    if found is None and _load_for(type(source)):
        found = _registered(source)
    return found


def library_of_dtype(dtype: object) -> TensorLibrary | None:
    """Return the library that a tensor dtype belongs to; None for other objects."""
    if not libraries:
        _load_for(type(dtype))
    for _, library in libraries:
        if library.carrier(dtype) is not None:
            return library
    return None


def thread_limit() -> int | None:
    """Return the fewest threads that a loaded library would use; None without any."""
    if not libraries:
        for package, load in _loaders.items():
            if package in sys.modules:
                load()
    least = None
    for _, library in libraries:
        limit = library.thread_limit()
        least = limit if least is None else min(least, limit)
    return least


def _registered(source: object) -> TensorLibrary | None:
    """Return the library of a tensor, if it is loaded; else None."""
    for kind, library in libraries:
        if isinstance(source, kind):
            return library
    return None


def _load_for(kind: type) -> bool:
    """Load the support for tensors of a type; return whether there is any."""
    for base in kind.__mro__:
        load = _loaders.get(base.__module__.partition(".")[0])
        if load is not None:
            load()
            return True
    return False
