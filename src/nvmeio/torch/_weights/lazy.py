"""Tensors of a checkpoint without values, which note how a loader arranges them.

A loader, such as transformers', renames, stacks, splits and transposes the tensors of a
checkpoint.  It may do so with these: what it makes of them says which bytes of which
tensors a weight consists of, before any is read.
"""

import bisect
import contextvars
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = [
    "LOADING",
    "Arrangement",
    "LazyTensor",
    "Loading",
    "Run",
    "arranged",
    "without_values",
]

aten = torch.ops.aten

# Runs of elements shorter than this, on average, are read with all in between.
RUN_BYTES = 4096
# So many runs are allowed anyway.
FEW_RUNS = 64
# How many runs are looked at, at most.
MOST_RUNS = 1 << 18


def without_values(
    size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor on the meta device, with these places in its storage."""
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    whole = torch.empty(max(offset + 1 + last, 0), dtype=dtype, device="meta")
    return whole.as_strided(size, stride, offset)


class LazyTensor(torch.Tensor):  # type: ignore[misc]  # torch is Any here
    """A tensor of the checkpoint, or what an operation makes of some."""

    # Of a tensor of the checkpoint, its name; otherwise the operation with its arguments,
    # and which of its results this is.
    _made: "str | _Made"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(name: str, shape: Sequence[int], dtype: torch.dtype) -> "LazyTensor":
        """Return a tensor of the checkpoint."""
        return LazyTensor._new(torch.empty(shape, dtype=dtype, device="meta"), name)

    @staticmethod
    def _new(shape: torch.Tensor, made: "str | _Made") -> "LazyTensor":
        found: LazyTensor = torch.Tensor._make_wrapper_subclass(
            LazyTensor,
            shape.size(),
            strides=shape.stride(),
            storage_offset=shape.storage_offset(),
            dtype=shape.dtype,
            device="cpu",
        )
        found._made = made
        return found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is aten.equal.default:
            # Two weights that are tied are one if the checkpoint has the same twice.
            return LOADING.get().equal(*args)
        if func is aten.constant_pad_nd.default and not any(args[1]):
            func, args = aten.clone.default, args[:1]
        if func not in _ARRANGING:
            names = dict.fromkeys(name for each in args for name in _names(each))
            raise _refused(
                f"{', '.join(names)} is loaded through {func}; a weight on a drive can "
                "only be renamed, cast, split, stacked, concatenated and transposed; load "
                "this model with from_pretrained()"
            )
        if torch.device(options.get("device") or "cpu").type != "cpu":
            raise _refused(f"a weight on a drive cannot be moved to {options['device']}")
        there = {**options, "device": None} if "device" in options else options
        made = func(*[_meta(each) for each in args], **there)
        several = isinstance(made, (list, tuple))
        found = [
            cls._new(each, _Made(func, args, options, index if several else None))
            for index, each in enumerate(made if several else [made])
        ]
        return found if several else found[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyTensor":
        # It never changes.
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


class Loading(NamedTuple):
    """How a loader's work goes: what compares two tensors, and what was refused.

    A loader may go on after an error.
    """

    equal: Callable[[LazyTensor, LazyTensor], bool]
    refusals: list[NotImplementedError]


LOADING: contextvars.ContextVar[Loading] = contextvars.ContextVar("nvmeio_loading")


def _refused(words: str) -> NotImplementedError:
    error = NotImplementedError(words)
    if (loading := LOADING.get(None)) is not None:
        loading.refusals.append(error)
    return error


def _names(value: Any) -> Iterator[str]:
    """Yield the names of the tensors of the checkpoint that a value is made of."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _names(each)
    elif isinstance(value, LazyTensor):
        made = value._made
        yield from [made] if isinstance(made, str) else _names(made.arguments)


class _Made(NamedTuple):
    function: Any
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    which: int | None

    def dimension(self, positions: Mapping[Any, int], ndim: int) -> int:
        position = positions[self.function]
        found: int = (
            self.arguments[position]
            if position < len(self.arguments)
            else self.options.get("dim", 0)
        )
        return found % ndim

    def on(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        made = self.function(*arguments, **options)
        return made if self.which is None else made[self.which]


def _meta(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        # Not kept, because there are several for each tensor of the checkpoint.
        size, stride, offset = value.size(), value.stride(), value.storage_offset()
        return without_values(size, stride, offset, value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_meta, value))
    return value


# Operations that leave the order of elements as it is.
_SAME_ORDER = {
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
}


# Operations that choose a part, and where among their arguments the dimension is.
_CHOOSING = {
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.unbind.int: 1,
}

# Operations that exchange dimensions, and the last one that they touch.
_MOVING: dict[Any, Callable[[int, Sequence[Any]], int]] = {
    aten.permute.default: lambda ndim, dims: max(
        [at for at, dim in enumerate(dims[0]) if dim % ndim != at], default=0
    ),
    aten.t.default: lambda ndim, dims: ndim - 1,
    aten.transpose.int: lambda ndim, dims: max(dim % ndim for dim in dims),
}

_JOINING = {aten.cat.default: 1, aten.stack.default: 1}

_ARRANGING = (
    {aten._to_copy.default}
    | _SAME_ORDER
    | _CHOOSING.keys()
    | _MOVING.keys()
    | _JOINING.keys()
)


class Run(NamedTuple):
    """Elements of a tensor of the checkpoint that lie side by side."""

    name: str
    begin: int
    length: int


class Arrangement(NamedTuple):
    """What a weight consists of.

    `runs` are its elements in their order; or None if these would be too short.  Then
    `make` returns the weight, given the tensors of the checkpoint by their names.
    """

    names: Sequence[str]
    stored: torch.dtype
    dtype: torch.dtype
    runs: Sequence[Run] | None
    make: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


def arranged(tensor: LazyTensor) -> Arrangement:
    """Return what a tensor that a loader has made consists of."""
    names: dict[str, torch.dtype] = {}
    casts = _casts(tensor, names)
    if len(set(names.values())) > 1 or len(casts) > 1:
        words = ", ".join(str(each) for each in {*names.values(), *casts})
        raise NotImplementedError(
            f"a weight on a drive is made of tensors of several dtypes: {words}"
        )
    stored = next(iter(names.values()))
    try:
        runs: Sequence[Run] | None = _runs(tensor)
    except _TooManyError:
        runs = None
    else:
        assert runs is not None
        if len(runs) > max(FEW_RUNS, tensor.numel() * stored.itemsize // RUN_BYTES):
            runs = None
    return Arrangement(
        list(names),
        stored,
        casts.pop() if casts else stored,
        runs,
        lambda values: _made_of(tensor, values),
    )


def _sources(made: _Made) -> list[LazyTensor]:
    first = made.arguments[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def _casts(tensor: LazyTensor, names: dict[str, torch.dtype]) -> set[torch.dtype]:
    """Return the dtypes to which parts are converted; add the tensors of the checkpoint."""
    made = tensor._made
    if isinstance(made, str):
        names[made] = tensor.dtype
        return set()
    found = set().union(*(_casts(each, names) for each in _sources(made)))
    if made.function is aten._to_copy.default and tensor.dtype != _sources(made)[0].dtype:
        found.add(tensor.dtype)
    return found


def _made_of(value: Any, values: Mapping[str, torch.Tensor]) -> Any:
    """Carry out what made a tensor, without casts."""
    if isinstance(value, (list, tuple)):
        return type(value)(_made_of(each, values) for each in value)
    if not isinstance(value, LazyTensor):
        return value
    made = value._made
    if isinstance(made, str):
        return values[made]
    if made.function is aten._to_copy.default:
        return _made_of(made.arguments[0], values)
    return made.on([_made_of(each, values) for each in made.arguments], made.options)


class _TooManyError(Exception):
    """There are too many runs to be read one by one."""


def _runs(tensor: LazyTensor) -> list[Run]:
    made = tensor._made
    if isinstance(made, str):
        return [Run(made, 0, tensor.numel())] if tensor.numel() else []
    sources = _sources(made)
    if made.function in _JOINING:
        return _joined(sources, made.dimension(_JOINING, tensor.ndim), tensor)
    (source,) = sources
    runs = _runs(source)
    if made.function in _SAME_ORDER or made.function is aten._to_copy.default:
        return runs
    cut = _Cutter(runs)
    if made.function in _CHOOSING:
        dim = made.dimension(_CHOOSING, source.ndim)
        chosen = _chosen(source, tensor, dim)
    else:
        dim = _MOVING[made.function](source.ndim, made.arguments[1:])
        chosen = _moved(made, source, dim)
    size = math.prod(source.shape[dim + 1 :])
    return _merged(
        run for begin, count in chosen for run in cut(begin * size, count * size)
    )


def _chosen(
    source: torch.Tensor, part: torch.Tensor, dim: int
) -> Iterator[tuple[int, int]]:
    """Yield which blocks after a dimension make a part: where they begin, and how many."""
    every, stride = source.shape[dim], source.stride(dim)
    outer = math.prod(source.shape[:dim])
    if not part.numel():
        return
    begin = (part.storage_offset() - source.storage_offset()) // stride
    step, count = 1, 1
    if part.ndim == source.ndim:
        step, count = part.stride(dim) // stride, part.shape[dim]
    if outer * (count if step > 1 else 1) > MOST_RUNS:
        raise _TooManyError
    for at in range(outer):
        if step == 1:
            yield at * every + begin, count
        else:
            for index in range(count):
                yield at * every + begin + index * step, 1


def _moved(made: _Made, source: LazyTensor, dim: int) -> Iterator[tuple[int, int]]:
    """Yield the blocks after a dimension in the order of an operation."""
    blocks = source.shape[: dim + 1]
    if math.prod(blocks) > MOST_RUNS:
        raise _TooManyError
    # Do the same to the numbers of blocks, each of which stands for its elements.
    numbers = torch.arange(math.prod(blocks)).view(*blocks, *[1] * (source.ndim - dim - 1))
    for number in made.on([numbers, *made.arguments[1:]], made.options).flatten().tolist():
        yield number, 1


def _joined(sources: Sequence[LazyTensor], dim: int, tensor: LazyTensor) -> list[Run]:
    """Return the runs of tensors that are stacked or concatenated."""
    outer = math.prod(tensor.shape[:dim])
    if outer * len(sources) > MOST_RUNS:
        raise _TooManyError
    cutters = [
        (_Cutter(_runs(each)), each.numel() // outer) for each in sources if each.numel()
    ]
    return _merged(
        run for at in range(outer) for cut, size in cutters for run in cut(at * size, size)
    )


class _Cutter:
    """Cuts parts out of a sequence of runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.ends = list(itertools.accumulate(run.length for run in runs))

    def __call__(self, begin: int, count: int) -> list[Run]:
        found = []
        at = bisect.bisect_right(self.ends, begin)
        while count:
            name, first, length = self.runs[at]
            inside = begin - (self.ends[at] - length)
            taken = min(length - inside, count)
            found.append(Run(name, first + inside, taken))
            begin, count, at = begin + taken, count - taken, at + 1
        return found


def _merged(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for run in runs:
        if found:
            name, begin, length = found[-1]
            if name == run.name and begin + length == run.begin:
                found[-1] = Run(name, begin, length + run.length)
                continue
        found.append(run)
        if len(found) > MOST_RUNS:
            raise _TooManyError
    return found
