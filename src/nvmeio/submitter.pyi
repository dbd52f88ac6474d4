from types import TracebackType
from typing import Any

from typing_extensions import Self, disjoint_base

from nvmeio._types import Path
from nvmeio.file import File
from nvmeio.latencies import Latencies
from nvmeio.request import Request

@disjoint_base
class Submitter:
    def submit_read(
        self, buffer: Any, file: Path | int | File, file_offset: int = 0
    ) -> Request: ...
    def submit_write(
        self, buffer: Any, file: Path | int | File, file_offset: int = 0
    ) -> Request: ...
    def submit_fsync(
        self, file: Path | int | File, *, data_only: bool = False
    ) -> Request: ...
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
