from types import TracebackType
from typing import final

from typing_extensions import disjoint_base

@disjoint_base
class Descriptor:
    @property
    def number(self) -> int: ...
    def open(self, path: str | bytes, flags: int, mode: int = 0o666) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> int: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class TemporaryName:
    def __init__(self, path: str) -> None: ...
    def keep(self) -> None: ...
    def __enter__(self) -> str: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

def opened(path: str | bytes, flags: int, mode: int = 0o666) -> Descriptor: ...
