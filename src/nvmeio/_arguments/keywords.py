"""Suggestions for misspelt keyword arguments: "did you mean ...?"."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

__all__ = ["hide_unknown", "hint_among", "refuse_unknown", "suggesting"]

P = ParamSpec("P")
R = TypeVar("R")

# Names that other libraries, or nvmeio's op for DeepSpeed, use -> the names to suggest.
_SYNONYMS = {
    "array": ("buffer", "out"),
    "data": ("buffer",),
    "file_offset": ("offset",),
    "file": ("filename",),
    "filename": ("file", "path"),
    "intra_op_parallelism": ("workers",),
    "num_threads": ("workers", "intra_op_parallelism"),
    "offset": ("file_offset",),
    "path": ("file",),
    "pinned": ("pin_memory",),
    "position": ("offset",),
    "tensor": ("buffer",),
    "threads": ("workers", "intra_op_parallelism"),
    "timeout_s": ("timeout",),
    "workers": ("intra_op_parallelism",),
}


def refuse_unknown(function: Any, unknown: Mapping[str, Any]) -> NoReturn:
    """Raise TypeError for unknown keywords, with a suggestion if one is similar."""
    keyword = next(iter(unknown))
    raise TypeError(
        f"{function.__name__}() got an unexpected keyword argument {keyword!r}"
        f"{hint_for(function, keyword)}"
    )


def hint_for(function: Callable[..., Any], keyword: str) -> str:
    """Return "; did you mean ...?" if a function has a similar keyword, else ""."""
    return hint_among(list(inspect.signature(function).parameters), keyword)


def hint_among(names: Sequence[str], keyword: str) -> str:
    """Return "; did you mean ...?" if one of the names is similar, else ""."""
    import difflib

    names = [name for name in names if name != "unknown"]
    near = [name for name in _SYNONYMS.get(keyword, ()) if name in names]
    near = near or difflib.get_close_matches(keyword, names, 1)
    near = near or [name for name in names if name.startswith(keyword)]
    return f"; did you mean {near[0]!r}?" if near else ""


def hide_unknown(kind: type) -> None:
    """Remove ``**unknown``, which only collects errors, from the methods' signatures."""
    for method in vars(kind).values():
        if hasattr(method, "__code__") and "unknown" in method.__code__.co_varnames:
            found = inspect.signature(method)
            public = [each for name, each in found.parameters.items() if name != "unknown"]
            method.__signature__ = found.replace(parameters=public)


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: the TypeError for an unknown keyword suggests the right one."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # A frame below this one means that the function itself raised the error.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            hints = [hint_for(function, keyword) for keyword in _unknown(function, kwargs)]
            if not any(hints):
                raise
            words = str(error).partition(". Did you mean")[0]
            raise TypeError(words + next(filter(None, hints))) from None

    if not function.__code__.co_flags & inspect.CO_COROUTINE:
        return called

    @functools.wraps(function)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await called(*args, **kwargs)  # type: ignore[misc]

    return awaited  # type: ignore[return-value]


def _unknown(function: Any, kwargs: Mapping[str, object]) -> list[str]:
    """Return the keywords that a function does not have."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [keyword for keyword in kwargs if keyword not in names]
