from typing import final

from nvmeio._arrays.indexing import Positions

@final
class NewBytes:
    values: list[bytes]
    def __init__(self, sizes: Positions) -> None: ...
