"""Names in code font become links to the reference, in which every public name must be."""

import pkgutil
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

from public_names import public_modules, public_names

__all__ = ["setup"]

LINKS = (nodes.reference, addnodes.pending_xref, nodes.title)
LOG = logging.getLogger(__name__)


class LinkNames(SphinxPostTransform):
    """Link names of documented objects, such as ``nvmeio.save`` or ``File.size``."""

    # Before references are resolved.
    default_priority = 5

    def run(self, **_: Any) -> None:
        """Make references of literals that are not part of one."""
        domains = self.env.domains
        python, c = domains.python_domain.objects, domains.c_domain
        functions = {name for name, _, kind, *_ in c.get_objects() if kind == "function"}
        for literal in [*self.document.findall(nodes.literal)]:
            if isinstance(literal.parent, LINKS):
                continue
            name = literal.astext().removesuffix("()")
            if name in functions:
                _link(literal, "c", "func", name)
            elif name in python:
                _link(literal, "py", "obj", name)
            # A bare `load` may be of several modules.
            elif f"nvmeio.{name}" in python and ("." in name or name[0].isupper()):
                _link(literal, "py", "obj", f"nvmeio.{name}")


def _link(literal: nodes.literal, domain: str, role: str, target: str) -> None:
    options = {"refdomain": domain, "reftype": role, "reftarget": target}
    literal.replace_self(addnodes.pending_xref("", literal.deepcopy(), **options))


def _check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that are on no page."""
    entries = env.domains.python_domain.objects.items()
    with mock(app.config.autodoc_mock_imports):
        documented = {id(_thing(name)) for name, entry in entries if not entry.aliased}
        for module in public_modules():
            for name, thing in public_names(module):
                if id(thing) not in documented:
                    LOG.warning(
                        "%s is public, and on no page: list it in a .rst file of "
                        "docs/reference, or take it out of __all__",
                        name,
                    )


def _thing(name: str) -> Any:
    """Return the object of a dotted name; for an attribute of instances only, the name."""
    try:
        return pkgutil.resolve_name(name)
    except AttributeError:
        return name


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform, and the check."""
    app.add_post_transform(LinkNames)
    app.connect("env-check-consistency", _check_complete)
    return {"parallel_read_safe": True}
