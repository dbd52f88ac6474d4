"""The directive `c-header`: what a header of include/nvmeio declares, and its comments.

It relies on the form that the headers have: a comment stands before a declaration, or
behind a member or a value.  Text that it cannot read is a warning.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["setup"]

ROOT = Path(__file__).resolve().parents[2]

_COMMENT = r"/\*((?:[^*]|\*(?!/))*)\*/"
_LAYOUT = re.compile(
    r"\s+|#include.*\n|#ifn?def.*\n|#endif.*\n|extern \"C\" \{\n#endif\n|\}\n#endif\n"
    r"|#define NVMEIO_\w+_H\n|#define NVMEIO_API .*\n"
)
_DECLARATION = re.compile(
    rf"(?:{_COMMENT}\n)?(?:"
    rf"\#define\ (?P<macro>NVMEIO_\w+)\ (?P<value>[^\n]*?)(?:\ {_COMMENT})?\n"
    r"|(?P<kind>struct|enum)\ (?P<type>nvmeio_\w+)\s\{(?P<body>.*?)\n?\s*\};\n"
    r"|(?P<opaque>struct\ nvmeio_\w+);\n"
    r"|NVMEIO_API\ (?P<function>[^;]*);\n)",
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(rf"\s*(?P<text>[^;,/]+)[;,]?[ \t]*(?:{_COMMENT})?")


class CHeader(SphinxDirective):
    """Document the header that the argument names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the declarations of the header as those of Sphinx's C domain."""
        path = ROOT / "include" / "nvmeio" / self.arguments[0]
        self.env.note_dependency(str(path))
        lines = StringList([*self._lines(path.read_text(encoding="utf-8"))], str(path))
        return self.parse_text_to_nodes("\n".join(lines))

    def _lines(self, text: str) -> Iterator[str]:
        about = re.match(_COMMENT, text)
        if about is None:
            raise self.error("the header does not begin with a comment")
        prose = about[1].partition("-- ")[2]
        yield from _prose(prose[0].upper() + prose[1:])
        at = about.end()
        while at < len(text):
            found = _LAYOUT.match(text, at) or _DECLARATION.match(text, at)
            if found is None:
                raise self.error(f"cannot read {text[at : at + 60]!r}")
            if found.re is _DECLARATION:
                if found["function"] and not found[1]:
                    raise self.error(f"no comment above {found['function']!r}")
                yield from _described(found)
            at = found.end()


def _described(found: re.Match[str]) -> Iterator[str]:
    """Yield the directive of one declaration."""
    above = found[1] or ""
    if found["macro"]:
        yield f".. c:macro:: {found['macro']}"
        value = " ".join(found["value"].split())
        yield from _indented(["", f"``{value}``", "", *_prose(above or found[4] or "")])
    elif found["function"]:
        yield f".. c:function:: {' '.join(found['function'].split())}"
        yield from _indented(["", *_prose(above)])
    elif found["opaque"]:
        yield f".. c:struct:: {found['opaque'].removeprefix('struct ')}"
        yield from _indented(["", *_prose(above), "Its members are private.", ""])
    else:
        yield f".. c:{found['kind']}:: {found['type']}"
        yield from _indented(["", *_prose(above)])
        role = "member" if found["kind"] == "struct" else "enumerator"
        for member in _MEMBER.finditer(found["body"]):
            yield f"   .. c:{role}:: {' '.join(member['text'].split())}"
            yield from _indented(["", *_prose(member[2] or "")], 6)


def _indented(lines: list[str], columns: int = 3) -> Iterator[str]:
    for line in lines:
        yield " " * columns + line if line else ""


def _prose(comment: str) -> list[str]:
    """Return a comment as lines of reStructuredText."""
    text = re.sub(r"^\s*\* ?", "", comment, flags=re.MULTILINE).strip()
    parts = re.split(r"`(\w[^`\n]*)`", text)
    parts[::2] = [
        re.sub(
            r"\b(nvmeio_\w+)\(\)", r":c:func:`\1`", re.sub(r"([*|\\`]|_\b)", r"\\\1", part)
        )
        for part in parts[::2]
    ]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    return [*"".join(parts).splitlines(), ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("c-header", CHeader)
    return {"parallel_read_safe": True}
