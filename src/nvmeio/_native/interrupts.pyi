from collections.abc import Callable
from threading import Lock
from typing import Any, ParamSpec, final

_P = ParamSpec("_P")

def call_if_free(lock: Lock, function: Callable[[], object]) -> bool: ...

@final
class Noted:
    def __init__(
        self, function: Callable[..., Any], errors: list[BaseException]
    ) -> None: ...
    def __call__(self, *arguments: Any) -> Any: ...
    def end(self) -> None: ...

@final
class Finalizer:
    def __init__(
        self,
        function: Callable[_P, object],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> None: ...
    def detach(self) -> None: ...
