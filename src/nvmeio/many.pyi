from typing import final

from nvmeio.request import Request

@final
class ManyRequest(Request): ...
