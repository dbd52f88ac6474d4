from typing import Any, Literal

from typing_extensions import disjoint_base

from nvmeio._types import Path
from nvmeio.file import File
from nvmeio.submitter import Submitter

@disjoint_base
class aio_handle(Submitter):
    last_error: OSError | None
    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        engine: Literal["auto", "io_uring", "libaio", "threads", "sync"] = "auto",
        direct: bool | Literal["auto"] = "auto",
        bounce: Literal["auto", "always", "never"] = "auto",
        errors: Literal["raise", "status"] = "raise",
    ) -> None: ...
    def get_block_size(self) -> int: ...
    def get_queue_depth(self) -> int: ...
    def get_single_submit(self) -> bool: ...
    def get_overlap_events(self) -> bool: ...
    def get_intra_op_parallelism(self) -> int: ...
    def get_alignment(self) -> int: ...
    def read(
        self,
        buffer: Any,
        filename: Path | int | File,
        validate: bool = False,
        file_offset: int = 0,
    ) -> int: ...
    def write(
        self,
        buffer: Any,
        filename: Path | int | File,
        validate: bool = False,
        file_offset: int = 0,
    ) -> int: ...
    def pread(self, *args: Any, **kwargs: Any) -> int: ...
    def pwrite(self, *args: Any, **kwargs: Any) -> int: ...
    def sync_pread(
        self, buffer: Any, filename: Path | int | File, file_offset: int = 0
    ) -> int: ...
    def sync_pwrite(
        self, buffer: Any, filename: Path | int | File, file_offset: int = 0
    ) -> int: ...
    def async_pread(
        self, buffer: Any, filename: Path | int | File, file_offset: int = 0
    ) -> int: ...
    def async_pwrite(
        self,
        buffer: Any,
        filename: Path | int | File | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int: ...
    def wait(self) -> int: ...
    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: Any = None, *, example_tenosr: Any = None
    ) -> Any: ...
    def free_cpu_locked_tensor(self, tensor: Any) -> bool: ...
    def is_pinned(self, buffer: Any) -> bool: ...
