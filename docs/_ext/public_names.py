"""The public names of nvmeio."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import nvmeio

__all__ = ["classes", "public_members", "public_modules", "public_names"]

_WITH_CLASSES = ("", ".futures", ".checkpoint", ".profiles", ".safetensors", ".torch")


def public_modules() -> Iterator[str]:
    """Yield the names of the modules that have no underscore before a part of them."""
    yield "nvmeio"
    for found in pkgutil.walk_packages(nvmeio.__path__, "nvmeio."):
        if "._" not in found.name:
            yield found.name


def public_names(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names in ``__all__`` of a module, and what they name."""
    imported = importlib.import_module(module)
    for name in imported.__all__:
        if not name.startswith("_"):
            yield f"{module}.{name}", getattr(imported, name)


def public_members(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names of a class's own and inherited members, and the members.

    Members of base classes that are not nvmeio's are left out.
    """
    if not inspect.isclass(thing):
        return
    for member in dir(thing):
        owner = next((kind for kind in thing.__mro__ if member in vars(kind)), None)
        if owner and owner.__module__.startswith("nvmeio") and not member.startswith("_"):
            found = inspect.getattr_static(thing, member)
            # Of class methods and static methods, the function.
            yield f"{name}.{member}", getattr(found, "__func__", found)


def classes() -> dict[str, str]:
    """Return how lists of parameters and errors call classes, with their dotted names."""
    return {
        name.rpartition(".")[2]: name
        for module in _WITH_CLASSES
        for name, thing in public_names(f"nvmeio{module}")
        if inspect.isclass(thing) and not thing.__name__.startswith("aio_")
    } | {
        # One is in nvmeio.safetensors and one in nvmeio.deepspeed: that of the page.
        "Installation": ".Installation"
    }
