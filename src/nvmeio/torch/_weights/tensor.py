"""A parameter whose values are on a drive: what each operation of torch gets for it.

Operations reach it below autograd, which therefore saves the parameter, or a view of it,
and no values: the backward pass reads them again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nvmeio.torch._weights.lazy import without_values
from nvmeio.torch._weights.rows import Rows
from nvmeio.torch._weights.store import Store, Weight, no_inference

__all__ = ["DiskParameter"]

aten = torch.ops.aten

_REMEDY = "use nvmeio.torch.remove_disk_offload() first"


class DiskParameter(torch.Tensor):  # type: ignore[misc]  # torch is Any here
    """A weight whose values are read from a drive when an operation needs them.

    It has the shape, dtype and device of the weight.  It cannot be changed, nor trained.
    """

    _weight: Weight
    _store: Store
    # What reads single rows, if it is a table.
    _rows: Rows | None = None
    # The operation that makes this from another one, its other arguments, and which of its
    # results this is; None for the weight itself.
    _made: tuple[Any, "DiskParameter", Sequence[Any], Mapping[str, Any], int | None] | None
    # To torch, an instance is a torch.nn.Parameter.
    _is_param = False

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def _new(
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
        weight: Weight,
        store: Store,
        made: Any,
    ) -> "DiskParameter":
        # As views of other tensors than those of inference, which are none themselves.
        with no_inference():
            found: DiskParameter = torch.Tensor._make_wrapper_subclass(
                DiskParameter,
                size,
                strides=stride,
                storage_offset=offset,
                dtype=dtype,
                device=weight.device,
            )
        # What asks C++ for the address, as DLPack does, would read where nothing is.
        torch._C._set_throw_on_mutable_data_ptr(found)
        found._weight, found._store, found._made = weight, store, made
        return found

    @staticmethod
    def of(weight: Weight, store: Store, rows: Rows | None = None) -> "DiskParameter":
        """Make the parameter of a weight, or of a table whose rows are read."""
        stride = torch.empty(weight.shape, device="meta").stride()
        found = DiskParameter._new(
            weight.shape, stride, 0, weight.dtype, weight, store, None
        )
        found._is_param, found._rows = True, rows
        return found

    @property
    def weight(self) -> Weight:
        """What is on the drive."""
        return self._weight

    @property
    def store(self) -> Store:
        """Where it is read from."""
        return self._store

    def values(self, found: Mapping[Weight, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the values, from those that were found or from the drive.

        They are in memory while they are held.
        """
        if self._made is None:
            if found is None:
                found = self._store.fetch([self._weight])
            return found[self._weight]
        function, source, arguments, options, index = self._made
        ids = source._row_of(function, arguments)
        if ids is not None:
            assert source._rows is not None
            return source._rows.read(ids)
        made = function(source.values(found), *arguments, **options)
        return made if index is None else made[index]

    def _row_of(self, function: Any, arguments: Sequence[Any]) -> torch.Tensor | None:
        """Return which row a view of a table is, if it is one."""
        if self._rows is None or function is not aten.select.int or arguments[0] % 2:
            return None
        return torch.tensor(arguments[1] % len(self))

    def _is_of_row(self) -> bool:
        """Return whether the values are those of a single row, which is read by itself."""
        if self._made is None:
            return False
        function, source, arguments, *_ = self._made
        return source._row_of(function, arguments) is not None or source._is_of_row()

    def _later(
        self, function: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """Return the result of an operation on the values, which is made when needed."""
        if function is aten.select.int and self._made is None and self._weight.parts:
            dim, index = arguments
            if dim % self.dim() == 0:
                return self._part(index)
        size, stride, offset = self.size(), self.stride(), self.storage_offset()
        how = (function, self, arguments, options, None)
        # Without a tensor on the meta device, because layers do these all the time.
        if function is aten.t.default:
            return self._made_by(how, size[::-1], stride[::-1], offset, self.dtype)
        if function is aten.detach.default:
            return self._made_by(how, size, stride, offset, self.dtype)
        source = without_values(size, stride, offset, self.dtype)
        there = {**options, "device": None} if "device" in options else options
        made = function(source, *arguments, **there)
        several = isinstance(made, (list, tuple))
        found = [
            self._made_by(
                (function, self, arguments, options, index if several else None),
                each.size(),
                each.stride(),
                each.storage_offset(),
                each.dtype,
            )
            for index, each in enumerate(made if several else [made])
        ]
        return found if several else found[0]

    def _stays(self, options: Mapping[str, Any]) -> bool:
        """Return whether a copy is to be on the same device."""
        device = options.get("device")
        return device is None or torch.device(device) == self.device

    def _part(self, index: int) -> "DiskParameter":
        """Return a part that is read by itself."""
        count = len(self._weight.parts)
        if not -count <= index < count:
            raise IndexError(
                f"index {index} is out of range for the weight {self._weight.name}, whose "
                f"first dimension has {count}"
            )
        return DiskParameter._new(
            self.shape[1:],
            self.stride()[1:],
            0,
            self.dtype,
            self._weight.parts[index],
            self._store,
            None,
        )

    def _made_by(
        self,
        made: Any,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
    ) -> "DiskParameter":
        return DiskParameter._new(
            size, stride, offset, dtype, self._weight, self._store, made
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        first = args[0] if args else None
        if type(first) is cls and first._rows is not None:
            ids = _rows_of(func, args[1:])
            if ids is not None:
                return first._rows.read(ids)
        traits = _TRAITS.get(func) or _Traits(func)
        if traits.is_later and type(first) is cls and first._stays(options):
            return first._later(func, args[1:], options)
        if func is aten.set_.source_Tensor and _are_one(*args):
            # A parametrization begins so.
            return first
        for position, name in traits.written:
            target = args[position] if position < len(args) else options.get(name)
            for each in target if isinstance(target, (list, tuple)) else [target]:
                if type(each) is cls:
                    each._refuse(f"changed by {func}")
        found: dict[Weight, torch.Tensor] = {}
        try:
            _fetch([*args, *options.values()], found)
            return func(
                *[_read(each, found) for each in args],
                **{name: _read(each, found) for name, each in options.items()},
            )
        except BaseException as error:
            # The traceback must not keep them in memory, nor must torch's part of it.
            found.clear()
            raise error.with_traceback(None)  # noqa: B904  # the same error

    def _refuse(self, what: str, remedy: str = "") -> None:
        raise RuntimeError(
            f"the weight {self._weight.name} is on a drive, and cannot be {what}; "
            f"{remedy}{_REMEDY}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"DiskParameter({self._weight.name!r}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype})"
        )

    def __copy__(self) -> "DiskParameter":
        # It never changes.
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "DiskParameter":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().clone().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array that cannot be written."""
        found = self.values().numpy(force=force)
        found.flags.writeable = False
        return found

    def tolist(self) -> Any:
        """Return the values as lists."""
        return self.values().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def data_ptr(self) -> int:
        """Raise RuntimeError: the values have no address while nobody holds them."""
        self._refuse("asked for its address")
        raise AssertionError

    def __dlpack__(self, **_: Any) -> Any:
        """Raise RuntimeError: another library could change the values."""
        self._refuse("passed through DLPack")

    def untyped_storage(self) -> Any:
        """Raise RuntimeError: the values have no storage while nobody holds them."""
        self._refuse("asked for its storage")

    def share_memory_(self) -> Any:
        """Raise RuntimeError: the values are not in memory."""
        self._refuse("moved to shared memory")

    @property
    def __tensor_flatten__(self) -> Any:
        """Raise RuntimeError in torch.compile, which asks for what it could compile."""
        if torch.compiler.is_compiling():
            self._refuse("compiled")
        raise AttributeError("__tensor_flatten__")

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Any:
        """Do nothing: only with this method torch asks for the other."""

    def requires_grad_(self, requires_grad: bool = True) -> "DiskParameter":
        """Return the parameter; raise RuntimeError if it should be trained."""
        if requires_grad:
            self._refuse("trained")
        return self

    @property
    def requires_grad(self) -> bool:
        """False: it cannot be trained."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def data(self) -> "DiskParameter":
        """The parameter itself."""
        return self

    @data.setter
    def data(self, value: Any) -> None:
        if value is not self:
            self._refuse("changed through .data")


def _are_one(one: Any, other: Any) -> bool:
    """Return whether two tensors are the same weight."""
    return (
        type(one) is type(other) is DiskParameter
        and one._made is other._made is None
        and one._weight is other._weight
    )


def _rows_of(function: Any, arguments: Sequence[Any]) -> torch.Tensor | None:
    """Return which rows of a table an operation takes, if it takes rows."""
    if function is aten.embedding.default:
        return arguments[0]
    if function is aten.index_select.default and arguments[0] == 0:
        return arguments[1]
    if function is aten.index.Tensor and len(arguments[0]) == 1:
        (ids,) = arguments[0]
        return ids if ids is not None and ids.dtype in (torch.int64, torch.int32) else None
    return None


def _fetch(arguments: Sequence[Any], found: dict[Weight, torch.Tensor]) -> None:
    """Find the values of all weights among arguments, which are read together."""
    stores: dict[Store, dict[Weight, None]] = {}
    for value in arguments:
        for each in value if type(value) in (list, tuple) else (value,):
            if type(each) is DiskParameter and not each._is_of_row():
                stores.setdefault(each._store, {})[each._weight] = None
    for store, wanted in stores.items():
        found.update(store.fetch([*wanted]))


def _read(value: Any, found: Mapping[Weight, torch.Tensor]) -> Any:
    kind = type(value)
    if kind is DiskParameter:
        return value.values(found)
    if kind in (list, tuple) and any(type(each) is DiskParameter for each in value):
        return kind(_read(each, found) for each in value)
    return value


# Of each operation that was called.
_TRAITS: dict[Any, "_Traits"] = {}


class _Traits:
    """What an operation of torch does with its arguments."""

    def __init__(self, function: Any) -> None:
        arguments, returns = function._schema.arguments, function._schema.returns
        # Collective operations do not say what they change; only send() has no "_".
        name = function._schema.name
        is_collective = name.startswith("c10d::") and name.endswith("_")
        # Those that it changes: their positions and names.
        self.written = [
            (position, argument.name)
            for position, argument in enumerate(arguments)
            if is_collective or (argument.alias_info and argument.alias_info.is_write)
        ]
        # Whether its result can be made later: a view, or the same in another dtype.
        self.is_later = function is aten._to_copy.default or (
            not self.written
            and len(returns) == 1
            and returns[0].alias_info is not None
            and arguments[0].alias_info is not None
        )
        _TRAITS[function] = self
