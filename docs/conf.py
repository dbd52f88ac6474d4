"""How Sphinx builds the documentation: `make docs`.

The source folder is the root of the repository, so that the links of the pages are the
same here and on a code host.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "_ext")]
# The width of the help texts of the command line.
os.environ["COLUMNS"] = "88"

import nvmeio  # noqa: E402
import public_names  # noqa: E402

project = "nvmeio"
version = release = nvmeio.__version__
root_doc = "docs/index"
include_patterns = [
    *("CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "src/libnvmeio/README.md"),
    *("bench/README.md", "bench/results/*.md", "tests/uncovered.md"),
    "tests/stress/README.md",
]
exclude_patterns = [".*", "build", "dist", "docs/_*", "**/__pycache__"]
# Pages that only other pages link.
suppress_warnings = ["toc.not_included"]

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    # In docs/_ext.
    "c_headers",
    "class_members",
    "command_line",
    "linked_names",
    "page_groups",
]

html_theme = "furo"
html_title = f"nvmeio {release}"
html_static_path = ["_static"]
html_css_files = ["nvmeio.css"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_copyright = False
# autosummary looks for them in the source folder.
templates_path = [str(ROOT / "docs" / "_templates")]

nitpicky = True
# Names of other projects are not linked.
nitpick_ignore_regex = [
    ("c:identifier", "u?int[0-9]+_t|size_t"),
    ("py:.*", r"(?!nvmeio\b).*"),
    ("std:(ref|term)", r"(python|numpy):.*"),
]
myst_heading_anchors = 4

autodoc_typehints = "none"
autodoc_member_order = "groupwise"
# They are documented without being installed.
autodoc_mock_imports = ["lightning", "lightning_fabric"]
# Members of these base classes are left out; class_members.py leaves out those in Python.
autosummary_context = {"foreign": "object, dict, tuple, Exception, OSError, ValueError"}
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {
    word: f":obj:`{word} <{name}>`" for word, name in public_names.classes().items()
}


def setup(app):  # noqa: ANN001, ANN201
    """Have autodoc's signatures, which are of one line, rather than numpydoc's."""
    app.connect(
        "autodoc-process-signature",
        lambda *args: args[-2:] if args[-2] else None,
        priority=100,
    )
