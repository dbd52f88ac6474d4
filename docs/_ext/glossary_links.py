"""On each page, the first use of a word of docs/glossary.md becomes a link to its row.

So the pages need no links that would be forgotten when a sentence moves.
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

__all__ = ["setup"]

_GLOSSARY = "docs/glossary"
# Pages for users.  The others explain these words, or use them in every sentence.
_LINKED = re.compile(r"docs/(?!index$|glossary$|design$|decisions$)\w[\w-]*$")
# Words that the pages also use in another sense.
_AMBIGUOUS = {
    *("block", "buffer", "cold", "drain", "gather", "handle", "profile", "record"),
    *("request", "scatter", "warm", "worker"),
}
_OUTSIDE = (
    *(nodes.reference, addnodes.pending_xref, nodes.title, nodes.literal),
    *(nodes.literal_block, nodes.image),
)


def _id_of(words: str) -> str:
    """Return the anchor of a row, from the words in its first cell."""
    return nodes.make_id("term-" + words.partition(",")[0])


class LinkTerms(SphinxPostTransform):
    """Give the rows of the glossary anchors, and link the words on other pages."""

    default_priority = 6

    def run(self, **_: Any) -> None:
        """Transform a page."""
        if self.env.docname == _GLOSSARY:
            for body in self.document.findall(nodes.tbody):
                for row in body.findall(nodes.row):
                    row["ids"].append(_id_of(row[0].astext()))
        elif _LINKED.match(self.env.docname):
            self._link_first_uses()

    def _link_first_uses(self) -> None:
        page = self.app.builder.get_relative_uri(self.env.docname, _GLOSSARY)
        left = dict(self.config.glossary_terms)
        for text in [*self.document.findall(nodes.Text)]:
            if _is_outside(text):
                continue
            parts: list[nodes.Node] = []
            rest = text.astext()
            while found := _pattern(left).search(rest):
                anchor = left[_known(found[1], left)]
                left = {word: at for word, at in left.items() if at != anchor}
                parts.append(nodes.Text(rest[: found.start()]))
                uri = f"{page}#{anchor}"
                link = nodes.reference("", found[0], internal=True, refuri=uri)
                link["classes"].append("term")
                parts.append(link)
                rest = rest[found.end() :]
            if parts:
                text.parent.replace(text, [*parts, nodes.Text(rest)])


def _is_outside(node: nodes.Node) -> bool:
    """Return whether a text is in a title, in a link or in code."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, _OUTSIDE):
            return True
    return False


def _pattern(words: dict[str, str]) -> re.Pattern[str]:
    """Return a pattern of words, in the singular and the plural; the longest is first."""
    longest = sorted(words, key=len, reverse=True)
    found = "|".join(map(re.escape, longest)) or "(?!)"
    return re.compile(rf"(?<![\w./-])({found})s?(?![\w/-])", re.IGNORECASE)


def _known(found: str, words: dict[str, str]) -> str:
    return next(word for word in words if word.lower() == found.lower())


def _read_terms(app: Sphinx, config: Any) -> None:
    """Read the words of the glossary, with the anchor of each."""
    text = (Path(app.srcdir) / f"{_GLOSSARY}.md").read_text(encoding="utf-8")
    _, *cells = re.findall(r"^\| (\w[^|]*?) \|", text, re.MULTILINE)
    config.glossary_terms = {
        word: _id_of(cell)
        for cell in cells
        for word in cell.split(", ")
        if word not in _AMBIGUOUS
    }


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform."""
    app.add_config_value("glossary_terms", {}, "env")
    app.connect("config-inited", _read_terms)
    app.add_post_transform(LinkTerms)
    return {"parallel_read_safe": True}
