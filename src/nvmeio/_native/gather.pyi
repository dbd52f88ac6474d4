from collections.abc import Callable
from typing import Any, final

from nvmeio._arrays.indexing import Positions
from nvmeio._native.request import Request

class GatherError(OSError):
    index: int
    failures: tuple[tuple[int, int], ...]
    def __init__(
        self,
        number: int | str,
        strerror: str | None = None,
        filename: str | bytes | int | None = None,
        failures: tuple[tuple[int, int], ...] = (),
    ) -> None: ...

class LateResult:
    make: Callable[[], Any]
    def __init__(self, make: Callable[[], Any]) -> None: ...

@final
class GatherRequest(Request): ...

@final
class NewBytes:
    values: list[bytes]
    def __init__(self, sizes: Positions) -> None: ...
