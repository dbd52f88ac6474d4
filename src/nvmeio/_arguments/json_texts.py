"""JSON from files, more strictly than Python reads it."""

import json
from collections import Counter
from typing import Any, NoReturn

__all__ = ["parse_json", "refuse_constant", "shortened", "unique"]

_SHOWN_CHARS_MAX = 1000


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError for a name that comes twice, and for NaN and Infinity.

    Of two values with one name, another reader may take the other one.
    """
    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if a name comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{shortened(twice)} comes twice")
    return found


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which Python's json accepts."""
    raise ValueError(f"{name} is not JSON")


def shortened(text: str) -> str:
    """Quote a text for a message, and shorten it, because a hostile one may have 100 MB."""
    return repr(text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "...")
