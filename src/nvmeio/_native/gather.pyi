from typing import final

from nvmeio._native.request import Request

class GatherError(OSError):
    index: int
    failures: tuple[tuple[int, int], ...]
    def __init__(
        self,
        number: int,
        strerror: str,
        filename: str | bytes | int,
        failures: tuple[tuple[int, int], ...],
    ) -> None: ...

@final
class GatherRequest(Request): ...
