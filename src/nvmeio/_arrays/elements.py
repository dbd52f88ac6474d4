"""Elements of arrays on disk: dtypes that are allowed, conversion of values."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.checks import refuse_masked, shown
from nvmeio._arrays.npy_header import check_element
from nvmeio._arrays.operators import Unread
from nvmeio._memory.registry import TensorLibrary, library_of, library_of_dtype
from nvmeio._memory.strides import without_fields

__all__ = ["Elements", "element_of", "storable"]

Array = npt.NDArray[Any]

# Errors of conversions: numbers raise OverflowError, tensors RuntimeError.
_MISFITS = (TypeError, ValueError, OverflowError, RuntimeError)


class Elements(NamedTuple):
    """The elements of an array on disk, and the type of its results."""

    dtype: np.dtype[Any]  # in the file
    # The library that makes tensors of results, and their dtype; None: results are arrays.
    library: TensorLibrary | None = None
    tensor_dtype: Any = None

    @property
    def shown(self) -> Any:
        """The dtype that users see."""
        return self.dtype if self.library is None else self.tensor_dtype

    def to_result(self, array: Array) -> Any:
        """Convert an array to the type of results."""
        return array if self.library is None else self.library.to_tensor(array, self.shown)

    def spread(self, values: Any, shape: tuple[int, ...]) -> Array:
        """Broadcast values to an array of a shape, as an assignment in numpy would."""
        carried = self._carried(values)
        same = isinstance(carried, np.ndarray) and carried.dtype == self.dtype
        if same and carried.shape == shape:
            whole = np.ascontiguousarray(without_fields(carried))
            return whole.view(self.dtype).reshape(shape)
        array: Array = np.empty(shape, self.dtype)
        try:
            array[...] = carried
        except _MISFITS as error:
            found = _shape_of(carried)
            if found is not None and not _fits(found, shape):
                raise ValueError(
                    f"the values are of shape {found}; they must broadcast to {shape}"
                ) from None
            raise self._misfit(values, error) from error
        return array

    def rows(self, values: Any, shape: tuple[int, ...]) -> Array:
        """Convert values to any number of rows of an array of a shape."""
        carried = self._carried(values)
        try:
            array = np.asarray(carried, self.dtype, order="C")
        except _MISFITS as error:
            raise self._misfit(values, error) from error
        if array.ndim != len(shape) or array.shape[1:] != shape[1:]:
            wanted = str((0, *shape[1:])).replace("0", "n", 1)
            raise ValueError(
                f"the values are of shape {array.shape}; rows to be appended must be of "
                f"shape {wanted}"
            )
        return array

    def _carried(self, values: Any) -> Any:
        """Convert values to something that numpy can convert to the elements."""
        refuse_masked("the value", values)
        library, dtype = self.library, self.tensor_dtype
        if isinstance(values, Unread):
            values = values[...]
        if library is None:
            library = library_of(values)
            if library is None:
                return values
            dtype = values.dtype
            carrier = library.carrier(dtype)
            if carrier is None or (carrier.kind == "V" and carrier != self.dtype):
                raise TypeError(
                    f"a tensor of {dtype} cannot be assigned to elements of {self.dtype}; "
                    "convert it first"
                )
        try:
            return library.to_carrier(values, dtype)
        except _MISFITS as error:
            if library_of(values) is not None:
                # Raises a precise error for tensors that are not plain arrays.
                library.export(values, False)
            raise self._misfit(values, error) from error

    def _misfit(self, values: Any, error: Exception) -> Exception:
        """Return the error for values that cannot be converted, of numpy's class."""
        what = f"of dtype {values.dtype}" if hasattr(values, "dtype") else shown(values)
        words = f"the values are {what}; they cannot be converted to {self.shown}"
        for kind in (ValueError, OverflowError):
            if isinstance(error, kind):
                return kind(words)
        return TypeError(words)


def _shape_of(values: Any) -> tuple[int, ...] | None:
    """Return the shape of values; None where they have none, as ragged lists."""
    try:
        shape: tuple[int, ...] = np.shape(values)
    except _MISFITS:
        return None
    return shape


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether numpy would broadcast values; it drops leading axes of extent 1."""
    more = max(0, len(found) - len(shape))
    pairs = zip(reversed(found[more:]), reversed(shape), strict=False)
    return set(found[:more]) <= {1} and all(one in (1, extent) for one, extent in pairs)


def storable(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype for elements that numpy.load() can restore exactly."""
    library, element = library_of_dtype(dtype), element_of(dtype)
    if library is not None and element.kind == "V":
        raise TypeError(
            f"the dtype is {dtype}, which numpy does not have, so numpy.load() would give "
            "bytes; use ArrayFile.create() or nvmeio.torch.save(), or convert it first"
        )
    return element


def element_of(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype that stores a dtype of numpy or torch as plain bytes."""
    library = library_of_dtype(dtype)
    carrier = None if library is None else library.carrier(dtype)
    element = _numpy_dtype(dtype) if carrier is None else carrier
    if element.hasobject:
        raise TypeError(f"elements of dtype {element} are Python objects, not bytes")
    check_element(element)
    return element


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Convert to a numpy dtype; refuse None, which numpy takes for float64."""
    try:
        if dtype is not None:
            element: np.dtype[Any] = np.dtype(dtype)
            return element
    except (TypeError, ValueError, SyntaxError):
        pass
    raise TypeError(f"dtype is {dtype!r}; it must be a dtype of numpy or torch")
