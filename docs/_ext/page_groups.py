"""The navigation: a group for each section of docs/index.md, of the pages it links.

So the page needs no directives, which a code host would show as they are.
"""

import re
from typing import Any

from sphinx.application import Sphinx

__all__ = ["setup"]

_TOCTREE = """
```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```
"""


def _add_toctrees(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the groups to the text of the first page."""
    if docname != app.config.root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        caption, _, text = section.partition("\n")
        pages = dict.fromkeys(re.findall(r"\]\(([^)#:]+)\.(?:md|rst)\)", text))
        if pages:
            source[0] += _TOCTREE.format(caption=caption, pages="\n".join(pages))


def _break_names(app: Sphinx, page: str, template: str, context: Any, tree: Any) -> None:
    """Let a dotted name that is too wide for the navigation break after a dot."""
    names = re.compile(r"(?<=>)nvmeio\.[\w.]+(?=</a>)")
    context["furo_navigation_tree"] = names.sub(
        lambda found: found[0].replace(".", ".<wbr>"), context["furo_navigation_tree"]
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Listen to Sphinx."""
    app.connect("source-read", _add_toctrees)
    # After the theme has made the navigation.
    app.connect("html-page-context", _break_names, priority=900)
    return {"parallel_read_safe": True}
