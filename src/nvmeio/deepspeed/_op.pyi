from types import TracebackType
from typing import Any, Literal

from typing_extensions import Self, disjoint_base

from nvmeio._arguments.types import FileLike, Path
from nvmeio._native.handle import Handle

@disjoint_base
class aio_handle:
    def __init__(
        self,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int | None = None,
        *,
        engine: Literal["auto", "io_uring", "libaio", "threads", "sync"] | None = None,
        direct: bool | Literal["auto"] | None = None,
        bounce: Literal["auto", "always", "never"] | None = None,
        errors: Literal["raise", "status"] = "raise",
    ) -> None: ...
    @property
    def handle(self) -> Handle: ...
    @property
    def last_error(self) -> OSError | None: ...
    def read(
        self,
        buffer: Any,
        filename: FileLike,
        validate: bool = False,
        file_offset: int = 0,
    ) -> int: ...
    def write(
        self,
        buffer: Any,
        filename: FileLike,
        validate: bool = False,
        file_offset: int = 0,
    ) -> int: ...
    def pread(self, *args: Any, **kwargs: Any) -> int: ...
    def pwrite(self, *args: Any, **kwargs: Any) -> int: ...
    def sync_pread(self, buffer: Any, filename: FileLike, file_offset: int = 0) -> int: ...
    def sync_pwrite(self, buffer: Any, filename: FileLike, file_offset: int = 0) -> int: ...
    def async_pread(self, buffer: Any, filename: FileLike, file_offset: int = 0) -> int: ...
    def async_pwrite(
        self,
        buffer: Any,
        filename: FileLike | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int: ...
    def wait(self) -> int: ...
    def get_block_size(self) -> int: ...
    def get_queue_depth(self) -> int: ...
    def get_single_submit(self) -> bool: ...
    def get_overlap_events(self) -> bool: ...
    def get_intra_op_parallelism(self) -> int: ...
    def get_alignment(self) -> int: ...
    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: Any = None, *, example_tenosr: Any = None
    ) -> Any: ...
    def free_cpu_locked_tensor(self, tensor: Any) -> bool: ...
    def is_pinned(self, buffer: Any) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...

def aio_read(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int: ...
def aio_write(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int: ...
def deepspeed_memcpy(dest: Any, src: Any) -> int: ...
