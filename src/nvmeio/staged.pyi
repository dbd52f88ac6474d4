from typing import final

from nvmeio.request import Request

@final
class StagedRequest(Request):
    def cancel(self) -> bool: ...
