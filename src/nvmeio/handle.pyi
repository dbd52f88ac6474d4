from typing import Any, Literal

from typing_extensions import Self, disjoint_base

from nvmeio._types import Path
from nvmeio.transfers import Transfers

@disjoint_base
class aio_handle(Transfers):
    def __init__(
        self,
        block_size: int | None = 1048576,
        queue_depth: int | None = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        engine: Literal["auto", "io_uring", "libaio", "threads", "sync"] | None = "auto",
        direct: bool | Literal["auto"] = "auto",
        bounce: Literal["auto", "always", "never"] | None = "auto",
        errors: Literal["raise", "status"] = "raise",
    ) -> None: ...
    @classmethod
    def from_profile(
        cls, path: Path, *, op: Literal["both", "read", "write"] = "both", **options: Any
    ) -> Self: ...
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
