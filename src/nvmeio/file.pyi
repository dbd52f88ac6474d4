from types import TracebackType
from typing import Literal, NoReturn, final

from typing_extensions import Self

from nvmeio._types import Path

@final
class File:
    path: str | bytes
    mode: str
    def __init__(
        self,
        path: Path,
        mode: Literal["r", "r+", "w", "x"] = "r",
        *,
        direct: bool | Literal["auto"] = "auto",
    ) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def truncate(self, size: int) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...

def open_for_writing(path: Path, direct: bool | Literal["auto"] = "auto") -> File: ...
