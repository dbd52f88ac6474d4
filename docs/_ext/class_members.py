"""Correct the entries that autodoc makes for classes.

The rows of the section "Attributes" become entries with an anchor, which the search finds.
Members that other packages define are left out.  A class shows its own signature even if
its base class is mocked.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from numpydoc.docscrape import NumpyDocString
from numpydoc.xref import make_xref
from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

__all__ = ["setup"]

_KINDS = ("class", "exception")
# What numpydoc makes of the section.
_SECTION = re.compile(r"^:Attributes:\n(?:\n|[ ].*\n)*", re.MULTILINE)


def _give_entries(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Replace the list of attributes by an entry for each row."""
    if what not in _KINDS or not obj.__doc__:
        return
    rows = NumpyDocString(inspect.cleandoc(obj.__doc__))["Attributes"]
    if not rows:
        return
    text, found = _SECTION.subn("", "\n".join([*lines, ""]))
    if found != 1:
        raise ValueError(f"{name}: numpydoc shows attributes in another way")
    lines[:] = text.splitlines()
    for row in rows:
        lines += _entry(app, obj, row)


def _entry(app: Sphinx, kind: type, row: Any) -> Iterator[str]:
    """Yield the directive of one row, which may have several names."""
    names = [name for name in row.name.split(", ") if not _is_shown(kind, name)]
    if names:
        yield from ("", f".. py:attribute:: {names[0]}")
        yield from (f"                  {name}" for name in names[1:])
        linked = make_xref(row.type, app.config.numpydoc_xref_aliases_complete, "all")
        text = [*row.desc]
        text[0] = f"{linked}: {text[0]}" if linked else text[0]
        yield from ("", *(f"   {line}" for line in text), "")


def _is_shown(kind: type, name: str) -> bool:
    """Return whether autodoc makes an entry itself: for properties with a docstring."""
    about = getattr(inspect.getattr_static(kind, name, None), "__doc__", None)
    is_data = inspect.isdatadescriptor(inspect.getattr_static(kind, name, None))
    return is_data and bool(about) and not _is_automatic(about)


def _is_automatic(about: str | None) -> bool:
    """Return whether a docstring is what ``NamedTuple`` gives its fields."""
    return (about or "").startswith("Alias for field number")


def _skip(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out members of other packages, and fields with an automatic docstring."""
    function = getattr(obj, "fget", None) or getattr(obj, "__func__", obj)
    module = getattr(function, "__module__", None) or "nvmeio"
    is_ours = module.partition(".")[0] == "nvmeio"
    return True if not is_ours or _is_automatic(obj.__doc__) else None


def _true_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: Any, returned: Any
) -> tuple[str, None] | None:
    """Return the signature of a class whose base class is mocked."""
    if what not in _KINDS or not any(hasattr(k, "__sphinx_mock__") for k in obj.__mro__):
        return None
    if "__init__" not in vars(obj):
        return "()", None
    found = signature(obj.__init__, bound_method=True)
    return stringify_signature(found, show_annotation=False), None


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to the events of autodoc."""
    # After numpydoc.
    app.connect("autodoc-process-docstring", _give_entries, priority=900)
    app.connect("autodoc-skip-member", _skip)
    # Before numpydoc and conf.py.
    app.connect("autodoc-process-signature", _true_signature, priority=50)
    return {"parallel_read_safe": True}
