from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from nvmeio._types import Path
from nvmeio.file import File
from nvmeio.request import Request
from nvmeio.submitter import Submitter

class Gatherer(Submitter):
    def gather(
        self,
        file: Path | int | File,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        out: Any,
        *,
        out_offsets: npt.ArrayLike | None = None,
        max_gap: int = 4096,
    ) -> int: ...
    def submit_gather(
        self,
        file: Path | int | File,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        out: Any,
        *,
        out_offsets: npt.ArrayLike | None = None,
        max_gap: int = 4096,
        result: Any = None,
        after: Request | Iterable[Request] | None = None,
    ) -> Request: ...
    def scatter(
        self,
        file: Path | int | File,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        buffer: Any,
        *,
        buffer_offsets: npt.ArrayLike | None = None,
    ) -> int: ...
    def submit_scatter(
        self,
        file: Path | int | File,
        offsets: npt.ArrayLike,
        sizes: int | npt.ArrayLike,
        buffer: Any,
        *,
        buffer_offsets: npt.ArrayLike | None = None,
        after: Request | Iterable[Request] | None = None,
    ) -> Request: ...
