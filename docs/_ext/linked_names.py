"""Names in code font become links to the reference.

Every public name must be in it, with an example, and so must the members of classes: an
example of the class, or of any of its members, calls each method.
"""

import io
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

import inventories
from public_names import public_members, public_modules, public_names

__all__ = ["setup"]

LINKS = (nodes.reference, addnodes.pending_xref, nodes.title)
LOG = logging.getLogger(__name__)
# The lines of code in the examples of a docstring.
_CODE = re.compile(r"^ *(?:>>>|\.\.\.).*", re.MULTILINE)


class LinkNames(SphinxPostTransform):
    """Link names of documented objects, such as ``nvmeio.save`` or ``File.size``."""

    # Before references are resolved.
    default_priority = 5

    def run(self, **_: Any) -> None:
        """Make references of literals that are not part of one."""
        domains = self.env.domains
        python, c = domains.python_domain.objects, domains.c_domain
        external = {name for name in inventories.NAMES if "." in name}
        functions = {name for name, _, kind, *_ in c.get_objects() if kind == "function"}
        for literal in [*self.document.findall(nodes.literal)]:
            if isinstance(literal.parent, LINKS):
                continue
            name = literal.astext().removesuffix("()")
            if name in functions:
                _link(literal, "c", "func", name)
            elif name in external or name in python:
                _link(literal, "py", "obj", name)
            # A bare `load` may be of several modules.
            elif f"nvmeio.{name}" in python and ("." in name or name[0].isupper()):
                _link(literal, "py", "obj", f"nvmeio.{name}")


def _link(literal: nodes.literal, domain: str, role: str, target: str) -> None:
    options = {"refdomain": domain, "reftype": role, "reftarget": target}
    literal.replace_self(addnodes.pending_xref("", literal.deepcopy(), **options))


def _check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that the reference documents incompletely, or not at all."""
    entries = {
        name: entry
        for name, entry in env.domains.python_domain.objects.items()
        if not entry.aliased
    }
    with mock(app.config.autodoc_mock_imports):
        documented = {id(_thing(name)) for name in entries}
        for module in public_modules():
            for name, thing in public_names(module):
                if id(thing) not in documented:
                    LOG.warning("%s is public, and on no page of docs/reference", name)
                if ">>>" not in (thing.__doc__ or ""):
                    LOG.warning("%s is public, and has no example", name)
                members = dict(public_members(name, thing)) if name in entries else {}
                for member in members:
                    if member not in entries:
                        LOG.warning("%s is public, and has no docstring", member)
                for method in _without_example(thing, members):
                    LOG.warning("%s is public, and in no example of its class", method)


def _without_example(kind: Any, members: dict[str, Any]) -> Iterator[str]:
    """Yield the methods that no example calls, and no other package defines."""
    bases = getattr(kind, "__mro__", ())
    foreign = [io.RawIOBase, *(base for base in bases if not _is_ours(base))]
    documented = "\n".join(str(one.__doc__) for one in [*bases, *members.values()])
    shown = "\n".join(_CODE.findall(documented))
    for name, member in members.items():
        called = name.rpartition(".")[2]
        # A base class that is mocked does not say which methods it has.
        is_foreign = any(
            hasattr(base, called) or hasattr(base, "__sphinx_mock__") for base in foreign
        )
        if callable(member) and not is_foreign and f".{called}(" not in shown:
            yield name


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("nvmeio")


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
