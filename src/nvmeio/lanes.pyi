from typing import final

BOUNCES: dict[str, int]
ENGINES: tuple[str, ...]

@final
class Lanes: ...
