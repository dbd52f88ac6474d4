"""The libraries of tensors that nvmeio can take, known by the types of their tensors.

nvmeio.torch registers itself here.  What loads it, when the first object of torch arrives,
is handed in by the package, for it stands above.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True)
class Export:
    """How a tensor is lent to the engine."""

    address: int  # where `nbytes` bytes lie in C order; 0 for a tensor on a device
    nbytes: int
    origin: int  # in the caller's own memory; 0 for a tensor on a device
    owner: object  # keeps the memory at `address` alive
    # Called with the tensor once a read has filled the memory.
    landing: Callable[[Any], None] | None = None
    stage: object = None  # moves a tensor on a device piece by piece


class TensorLibrary(Protocol):
    """What a library of tensors provides; nvmeio.torch._tensors documents each."""

    def export(self, tensor: Any, writable: bool) -> Export:
        """Lend the memory of any tensor that has some."""

    def touch(self, tensor: Any) -> None:
        """Count a change of a tensor's values."""

    def locked_tensor(self, num_elem: int, example: Any) -> Any:
        """Make a tensor in locked memory of the pool."""

    def first_address(self, tensor: Any) -> int:
        """Return where the first element of a tensor lies; 0 where there is no memory."""

    def is_pinned(self, tensor: Any) -> bool:
        """Tell whether a tensor lies in pinned memory."""

    def copy(self, dest: Any, src: Any) -> None:
        """Copy the elements of a tensor into another of the same dtype and count."""

    def host_like(self, tensor: Any) -> Any:
        """Make a tensor of the same size and dtype in memory of the host."""

    def announce(self, memory: Any) -> None:
        """Tell the drivers of devices of new pinned memory of the pool."""

    def thread_limit(self) -> int:
        """Return how many threads the library itself would use."""

    def carrier(self, dtype: Any) -> np.dtype[Any] | None:
        """Return numpy's dtype for elements of a dtype; None where it is not its own."""

    def dress(self, array: npt.NDArray[Any], dtype: Any) -> Any:
        """Make a tensor of an array of carriers, which share memory."""

    def undress(self, values: Any, dtype: Any) -> npt.NDArray[Any]:
        """Make an array of carriers of whatever tensors of a dtype are made of."""


# Each library with the type of its tensors.  Only grows.
libraries: list[tuple[type, TensorLibrary]] = []

_loaders: dict[str, Callable[[], object]] = {}


def register(kind: type, library: TensorLibrary) -> None:
    """Make a library of tensors known, for the life of the process."""
    libraries.append((kind, library))


def register_loader(package: str, load: Callable[[], object]) -> None:
    """Say how to load what registers the library of a package's tensors."""
    _loaders[package] = load


def library_of(source: object) -> TensorLibrary | None:
    """Return the library that a tensor belongs to; None for what is no tensor."""
    found = _registered(source)
    if found is None and _load_for(type(source)):
        found = _registered(source)
    return found


def library_of_dtype(dtype: object) -> TensorLibrary | None:
    """Return the library that a dtype of tensors belongs to; None for other objects."""
    if not libraries:
        _load_for(type(dtype))
    for _, library in libraries:
        if library.carrier(dtype) is not None:
            return library
    return None


def thread_limit() -> int | None:
    """Return how many threads the loaded libraries use at a time; None without any."""
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
    """Return the library of a tensor, as far as it is loaded."""
    for kind, library in libraries:
        if isinstance(source, kind):
            return library
    return None


def _load_for(kind: type) -> bool:
    """Load what lends tensors of a type; tell whether there is any such thing."""
    for base in kind.__mro__:
        load = _loaders.get(base.__module__.partition(".")[0])
        if load is not None:
            load()
            return True
    return False
