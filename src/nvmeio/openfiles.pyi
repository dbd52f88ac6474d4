from typing import final

@final
class OpenFiles: ...
