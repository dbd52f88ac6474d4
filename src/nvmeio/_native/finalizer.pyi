from collections.abc import Callable
from typing import ParamSpec, final

_P = ParamSpec("_P")

@final
class Finalizer:
    def __init__(
        self,
        function: Callable[_P, object],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> None: ...
    def detach(self) -> None: ...
