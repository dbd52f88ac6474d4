"""HTML tables that notebooks show instead of a repr."""

from collections import OrderedDict
from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["Figures", "html_table"]


class Figures(dict[str, Any]):
    """A dict that notebooks show as a table."""

    def _repr_html_(self) -> str:
        return html_table("", self)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.load refuses a type that it does not know, and a plain dict made by a call.
        return OrderedDict, (), None, None, iter(self.items())


def html_table(caption: str, rows: Mapping[str, object]) -> str:
    """Return an HTML table of names and values, with separators between thousands."""
    cells = (
        f"<tr><th>{escape(name)}</th><td>{escape(_text(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(caption)}</caption>{''.join(cells)}</table>"


def _text(value: object) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else str(value)
