"""Find the code that called nvmeio, which warnings should name."""

import sys
import types

__all__ = ["level_outside"]

# Modules whose frames are not those of the caller; contextlib's run our context managers.
_INSIDE = ("nvmeio", "contextlib")


def level_outside() -> int:
    """Return the ``stacklevel`` that makes a warning name the code that called nvmeio."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level
