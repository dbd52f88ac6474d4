import weakref
from typing import final

from nvmeio._listener import Watcher

BOUNCES: dict[str, int]
ENGINES: tuple[str, ...]

@final
class Lanes:
    @property
    def watchers(self) -> set[weakref.ref[Watcher]] | None: ...
    def watch(self, fd: int) -> None: ...
    def unwatch(self, fd: int) -> None: ...
    def collect(self) -> int: ...
