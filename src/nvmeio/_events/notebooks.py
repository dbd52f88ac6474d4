"""HTML tables that notebooks show instead of a repr."""

from collections.abc import Mapping
from html import escape

__all__ = ["html_table"]


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
