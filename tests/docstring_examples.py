"""Find and run the examples in the docstrings of public names and of their members."""

import doctest
import gc
import pkgutil
import re

import numpy as np
import pytest

import nvmeio
from public_names import public_members, public_modules, public_names

__all__ = ["examples", "run_example"]

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Examples that import these run in tests/deepspeed and tests/models, which install them.
ELSEWHERE = {"deepspeed", "lightning", "transformers"}


def examples(*packages):
    """Return the public names and members whose examples need these packages, or none."""
    found = {}
    for module in public_modules():
        try:
            for public in public_names(module):
                for name, thing in [public, *public_members(*public)]:
                    # Several modules may export the same object.
                    if ">>>" in (thing.__doc__ or ""):
                        found.setdefault(id(thing), (name, needed_by(thing.__doc__)))
        except ModuleNotFoundError as error:
            if error.name not in {"torch", *ELSEWHERE}:
                raise
    return [name for name, needed in found.values() if needed == {*packages}]


def imported_by(documented):
    """Return the packages that an example imports."""
    return {*re.findall(r">>> (?:import|from) (\w+)", documented)}


def needed_by(documented):
    """Return the packages of ELSEWHERE that an example imports."""
    return imported_by(documented).intersection(ELSEWHERE)


def run_example(name, folder, monkeypatch):
    """Run the example of a name in a folder, with ``np`` and ``nvmeio`` imported."""
    documented = pkgutil.resolve_name(name).__doc__
    optional = {"torch", "safetensors", *ELSEWHERE}
    for package in imported_by(documented).intersection(optional):
        pytest.importorskip(package, reason=f"{package} is not installed")
    # Cycles that other tests have left may hold memory of the pool, some through tensors,
    # which go only at the second time.
    gc.collect()
    gc.collect()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    names = {"np": np, "nvmeio": nvmeio}
    test = doctest.DocTestParser().get_doctest(documented, names, name, None, 0)
    printed = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)
