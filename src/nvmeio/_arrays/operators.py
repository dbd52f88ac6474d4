"""The operators and functions of numpy arrays that an array on disk refuses.

They would silently read the whole file.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Unread"]

_READ_FIRST = "read it first: array[...]"

# Functions that need no elements.
_ATTRIBUTES = {np.shape: "shape", np.ndim: "ndim"}


def _refusal(symbol: str) -> Callable[..., Any]:
    """Return a method that raises TypeError for an operator."""

    def refuse(self: object, *_: object) -> Any:
        raise TypeError(f"an {type(self).__name__} has no operator {symbol}; {_READ_FIRST}")

    return refuse


class Unread:
    """Base of an array whose elements are not in memory: refuses operators.

    It equals only itself, so that it can be hashed and weakly referenced.
    """

    __lt__ = _refusal("<")
    __le__ = _refusal("<=")
    __gt__ = _refusal(">")
    __ge__ = _refusal(">=")
    __contains__ = _refusal("in")
    __add__ = __radd__ = _refusal("+")
    __sub__ = __rsub__ = _refusal("-")
    __mul__ = __rmul__ = _refusal("*")
    __matmul__ = __rmatmul__ = _refusal("@")
    __truediv__ = __rtruediv__ = _refusal("/")
    __floordiv__ = __rfloordiv__ = _refusal("//")
    __mod__ = __rmod__ = _refusal("%")
    __divmod__ = __rdivmod__ = _refusal("divmod")
    __pow__ = __rpow__ = _refusal("**")
    __lshift__ = __rlshift__ = _refusal("<<")
    __rshift__ = __rrshift__ = _refusal(">>")
    __and__ = __rand__ = _refusal("&")
    __or__ = __ror__ = _refusal("|")
    __xor__ = __rxor__ = _refusal("^")
    __neg__ = _refusal("-")
    __pos__ = _refusal("+")
    __invert__ = _refusal("~")
    __abs__ = _refusal("abs")

    def __eq__(self, other: object) -> bool:
        return self is other or bool(_refusal("==")(self))

    def __ne__(self, other: object) -> bool:
        return self is not other and bool(_refusal("!=")(self))

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise TypeError(
            f"an {type(self).__name__} is neither true nor false; use len(array), or "
            f"{_READ_FIRST}"
        )

    def __array_ufunc__(self, ufunc: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"numpy.{ufunc.__name__}() takes no {type(self).__name__}; {_READ_FIRST}"
        )

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"torch's {function.__name__}() takes no {cls.__name__}; {_READ_FIRST}"
        )

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Refuse numpy.sum() and the like, which would silently read the whole file.

        numpy.asarray() asks for that explicitly, and is allowed.
        """
        if function in _ATTRIBUTES and args == (self,):
            return getattr(self, _ATTRIBUTES[function])
        raise TypeError(
            f"{function.__module__}.{function.__name__}() takes no "
            f"{type(self).__name__}; {_READ_FIRST}"
        )
