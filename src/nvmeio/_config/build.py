"""What the build left behind: where headers and library lie, and what they contain."""

import contextlib
import os
from typing import TypedDict

__all__ = [
    "BuildInfo",
    "BuildRecord",
    "EngineInfo",
    "Feature",
    "build_record",
    "get_include",
    "get_library_dir",
    "versions",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


class Feature(TypedDict):
    """An optional library as the build met it."""

    built: bool
    version: str
    flags: list[str]
    reason: str


class BuildRecord(TypedDict):
    """The part of ``build_info()`` that was settled when nvmeio was compiled."""

    version: str
    debug: bool
    test_build: bool
    compiler: str
    cython: str
    flags: list[str]
    link_flags: list[str]
    ldflags: list[str]
    features: dict[str, Feature]


class EngineInfo(TypedDict):
    """What was found out about one engine."""

    built: bool
    works: bool
    errno: int
    reason: str


class BuildInfo(BuildRecord):
    """What this installation consists of."""

    engines: dict[str, EngineInfo]


def get_include() -> str:
    """Return the folder to give to a compiler for the C headers.

    Returns
    -------
    str
        The folder in which ``nvmeio/nvmeio.h`` lies.  Modules that cimport nvmeio
        need it too, for its ``.pxd`` files name that header.

    Raises
    ------
    FileNotFoundError
        If the headers are not where this package was installed.

    Examples
    --------
    >>> import os
    >>> os.path.isfile(os.path.join(nvmeio.get_include(), "nvmeio", "nvmeio.h"))
    True
    """
    # An editable install keeps the headers where the sources have them.
    sources = os.path.dirname(os.path.dirname(_PACKAGE))
    for folder in (_PACKAGE, sources):
        if os.path.isfile(os.path.join(folder, "include/nvmeio/nvmeio.h")):
            return os.path.join(folder, "include")
    raise FileNotFoundError(f"the headers of nvmeio are not in {_PACKAGE}/include")


def get_library_dir() -> str:
    """Return the folder of ``libnvmeio.so``, which the package loads, and the archive.

    Returns
    -------
    str
        The folder to give to a linker, also as the path where programs look for the
        library when they run.  Its ``pkgconfig/nvmeio.pc`` says all of that to pkg-config.
        ``build_info()["link_flags"]`` has the flags that must follow the archive.

    Raises
    ------
    FileNotFoundError
        If they are not where this package was installed.

    Notes
    -----
    A Python extension must not link the archive: it would get a pool and fork handlers of
    its own.  With ``-lnvmeio`` it shares those of the package.

    Examples
    --------
    >>> import os
    >>> os.path.isfile(os.path.join(nvmeio.get_library_dir(), "libnvmeio.so"))
    True
    """
    folder = os.path.join(_PACKAGE, "lib")
    if not os.path.isfile(os.path.join(folder, "libnvmeio.a")):
        raise FileNotFoundError(f"libnvmeio.a is not in {folder}: build nvmeio first")
    return folder


def build_record() -> BuildRecord:
    """Return what setup.py recorded when it built the library beside this file."""
    import json

    with open(os.path.join(get_library_dir(), "build.json"), encoding="utf-8") as file:
        record: BuildRecord = json.load(file)
    return record


def versions() -> dict[str, str | None]:
    """Return the versions of nvmeio, Python, numpy and torch, None where it is missing."""
    # Loaded on first use, for few programs ask.
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {
        "nvmeio": build_record()["version"],
        "python": platform.python_version(),
        "numpy": None,
        "torch": None,
    }
    for package in ("numpy", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
