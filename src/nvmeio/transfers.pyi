from typing import Any

from typing_extensions import disjoint_base

from nvmeio._types import Path
from nvmeio.file import File
from nvmeio.gather import Gatherer

@disjoint_base
class Transfers(Gatherer):
    @property
    def last_error(self) -> OSError | None: ...
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
