from collections.abc import Iterable
from types import TracebackType
from typing import Any

from typing_extensions import Self, disjoint_base

from nvmeio._types import Path
from nvmeio.file import File
from nvmeio.latencies import Latencies
from nvmeio.request import Request

_Items = Iterable[tuple[Any, Path | int | File, int]]

@disjoint_base
class Submitter:
    def submit_read(
        self,
        buffer: Any,
        file: Path | int | File,
        file_offset: int = 0,
        *,
        after: Request | Iterable[Request] | None = None,
    ) -> Request: ...
    def submit_write(
        self,
        buffer: Any,
        file: Path | int | File,
        file_offset: int = 0,
        *,
        after: Request | Iterable[Request] | None = None,
    ) -> Request: ...
    def submit_fsync(
        self,
        file: Path | int | File,
        *,
        data_only: bool = False,
        after: Request | Iterable[Request] | None = None,
    ) -> Request: ...
    def submit_read_many(
        self, items: _Items, *, after: Request | Iterable[Request] | None = None
    ) -> Request: ...
    def submit_write_many(
        self, items: _Items, *, after: Request | Iterable[Request] | None = None
    ) -> Request: ...
    def read_many(self, items: _Items) -> int: ...
    def write_many(self, items: _Items) -> int: ...
    def drain(self, timeout_s: float | None = None) -> None: ...
    def fsync(self, file: Path | int | File, *, data_only: bool = False) -> None: ...
    @property
    def pending(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def latencies(self) -> Latencies: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...
