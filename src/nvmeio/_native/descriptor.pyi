from types import TracebackType

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

def opened(path: str | bytes, flags: int, mode: int = 0o666) -> Descriptor: ...
