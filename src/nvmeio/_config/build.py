"""The results of the build: headers, libraries, and the record of how they were built."""

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
    """An optional library: whether it was built in, and why not."""

    built: bool
    version: str
    flags: list[str]
    reason: str


class BuildRecord(TypedDict):
    """The part of ``build_info()`` that was recorded when nvmeio was compiled."""

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
    """The result of trying one engine."""

    built: bool
    works: bool
    errno: int
    reason: str


class BuildInfo(BuildRecord):
    """The result of ``build_info()``."""

    engines: dict[str, EngineInfo]


def get_include() -> str:
    """Return the include directory of the C headers, for a compiler's ``-I``.

    Returns
    -------
    str
        The directory that contains ``nvmeio/nvmeio.h``.  Modules that cimport nvmeio need
        it too, because its ``.pxd`` files refer to that header.

    Raises
    ------
    FileNotFoundError
        The headers are missing from this installation.

    Examples
    --------
    >>> import os
    >>> os.path.isfile(os.path.join(nvmeio.get_include(), "nvmeio", "nvmeio.h"))
    True
    """
    # In an editable install the headers are in the source tree.
    sources = os.path.dirname(os.path.dirname(_PACKAGE))
    for folder in (_PACKAGE, sources):
        if os.path.isfile(os.path.join(folder, "include/nvmeio/nvmeio.h")):
            return os.path.join(folder, "include")
    raise FileNotFoundError(f"the headers of nvmeio are not in {_PACKAGE}/include")


def get_library_dir() -> str:
    """Return the directory of ``libnvmeio.so`` and ``libnvmeio.a``, for a linker's ``-L``.

    Returns
    -------
    str
        The directory to link with, and to set as the run path.  Its ``pkgconfig/nvmeio.pc``
        has both for pkg-config.  ``build_info()["link_flags"]`` has the flags that must
        follow ``libnvmeio.a``.

    Raises
    ------
    FileNotFoundError
        The libraries are missing from this installation.

    Notes
    -----
    A Python extension must not link ``libnvmeio.a``, which would give it a pool and fork
    handlers of its own.  With ``-lnvmeio`` it shares those of the package.

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
    """Return the versions of nvmeio, Python, numpy and torch; None for a missing one."""
    # Imported on first use, because few programs need it.
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
