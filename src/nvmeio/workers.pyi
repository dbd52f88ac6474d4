import weakref
from typing import final

from nvmeio._listener import Watcher
from nvmeio.request import Request

BOUNCES: dict[str, int]
ENGINES: tuple[str, ...]

@final
class Workers:
    @property
    def watchers(self) -> set[weakref.ref[Watcher]] | None: ...
    def keep(self, request: Request) -> None: ...
    def watch(self, fd: int) -> None: ...
    def unwatch(self, fd: int) -> None: ...
    def collect(self) -> int: ...
