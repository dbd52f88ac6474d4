"""The log of the package, which does without ``logging`` until the program imports it."""

import sys
from typing import Any

__all__ = ["log"]


class _Log:
    """The logger "nvmeio".

    Nobody has configured logging before it is imported, and nothing would be logged; it
    takes 3 to 6 ms.
    """

    def __getattr__(self, name: str) -> Any:
        if "logging" not in sys.modules:
            return _nothing
        import logging

        logger = logging.getLogger("nvmeio")
        if not logger.handlers:
            # Python would print warnings otherwise.
            logger.addHandler(logging.NullHandler())
        return getattr(logger, name)


def _nothing(*args: object, **options: object) -> None:
    """Take a message that nobody wants."""


log = _Log()
