from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import numpy.typing as npt
from typing_extensions import Self, disjoint_base

from nvmeio._arguments.types import FileLike, Path
from nvmeio._events.latencies import Latencies
from nvmeio._native.file import File
from nvmeio._native.request import Request

_T = TypeVar("_T")
_Items = Iterable[tuple[Any, FileLike, int]]

@disjoint_base
class Handle:
    def __init__(
        self,
        *,
        engine: Literal["auto", "io_uring", "libaio", "threads", "sync"] | None = None,
        direct: bool | Literal["auto"] | None = None,
        bounce: Literal["auto", "always", "never"] | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
        workers: int | None = None,
        check_overlap: bool | None = None,
    ) -> None: ...
    @classmethod
    def from_profile(
        cls, path: Path, *, op: Literal["both", "read", "write"] = "both", **options: Any
    ) -> Self: ...
    @property
    def engine(self) -> str: ...
    @property
    def direct(self) -> bool | Literal["auto"]: ...
    @property
    def bounce(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def check_overlap(self) -> bool: ...
    def read(self, buffer: Any, file: FileLike, offset: int = 0) -> int: ...
    def write(self, buffer: Any, file: FileLike, offset: int = 0) -> int: ...
    def submit_read(
        self,
        buffer: Any,
        file: FileLike,
        offset: int = 0,
        *,
        after: Request | Iterable[Request] | None = None,
    ) -> Request[int]: ...
    def submit_write(
        self,
        buffer: Any,
        file: FileLike,
        offset: int = 0,
        *,
        after: Request | Iterable[Request] | None = None,
    ) -> Request[int]: ...
    def submit_fsync(
        self,
        file: FileLike,
        *,
        data_only: bool = False,
        after: Request | Iterable[Request] | None = None,
    ) -> Request[int]: ...
    def submit_read_many(
        self, items: _Items, *, after: Request | Iterable[Request] | None = None
    ) -> Request[int]: ...
    def submit_write_many(
        self, items: _Items, *, after: Request | Iterable[Request] | None = None
    ) -> Request[int]: ...
    def read_many(self, items: _Items) -> int: ...
    def write_many(self, items: _Items) -> int: ...
    def drain(self, timeout: float | None = None) -> None: ...
    def fsync(self, file: FileLike, *, data_only: bool = False) -> None: ...
    def gather(
        self,
        file: FileLike,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        out: Any,
        *,
        out_offsets: npt.ArrayLike | None = None,
        max_gap: int = 4096,
    ) -> int: ...
    @overload
    def submit_gather(
        self,
        file: FileLike,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        out: Any,
        *,
        out_offsets: npt.ArrayLike | None = None,
        max_gap: int = 4096,
        result: None = None,
        after: Request | Iterable[Request] | None = None,
    ) -> Request[int]: ...
    @overload
    def submit_gather(
        self,
        file: FileLike,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        out: Any,
        *,
        out_offsets: npt.ArrayLike | None = None,
        max_gap: int = 4096,
        result: _T,
        after: Request | Iterable[Request] | None = None,
    ) -> Request[_T]: ...
    def scatter(
        self,
        file: FileLike,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        buffer: Any,
        *,
        buffer_offsets: npt.ArrayLike | None = None,
    ) -> int: ...
    def submit_scatter(
        self,
        file: FileLike,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        buffer: Any,
        *,
        buffer_offsets: npt.ArrayLike | None = None,
        after: Request | Iterable[Request] | None = None,
    ) -> Request[int]: ...
    @property
    def pending(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def latencies(self) -> Latencies: ...
    def close(self) -> None: ...
    def _open(self, file: FileLike) -> File: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...
