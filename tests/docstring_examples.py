"""Find and run the examples in the docstrings of public names."""

import doctest
import re
from importlib import import_module

import numpy as np
import pytest

import nvmeio
from public_names import public_modules, public_names

__all__ = ["examples", "run_example"]

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Examples that import these run in tests/deepspeed and tests/models, where they are
# installed.
ELSEWHERE = {"deepspeed", "lightning", "megatron", "torch_checkpointing"}


def examples(*packages):
    """Return the public names whose examples need these packages, by default none."""
    found = {}
    for module in public_modules():
        try:
            # Several modules may export the same object.
            for name, thing in public_names(module):
                found.setdefault(id(thing), (name, needed_by(thing.__doc__) & ELSEWHERE))
        except ModuleNotFoundError as error:
            if error.name not in {"torch", *ELSEWHERE}:
                raise
    return [name for name, needed in found.values() if needed == {*packages}]


def needed_by(documented):
    """Return the packages that an example imports."""
    return set(re.findall(r">>> import (\w+)", documented))


def run_example(name, folder, monkeypatch):
    """Run the example of a public name in a folder, with ``np`` and ``nvmeio`` imported."""
    module, _, attribute = name.rpartition(".")
    documented = getattr(import_module(module), attribute).__doc__
    for package in needed_by(documented):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    names = {"np": np, "nvmeio": nvmeio}
    test = doctest.DocTestParser().get_doctest(documented, names, name, None, 0)
    shown = "".join(example.source for example in test.examples)
    assert attribute in shown, "the example does not use the name that it documents"
    printed = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)
