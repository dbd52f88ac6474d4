"""What the build left behind: where headers and library lie, and what they contain."""

import json
from pathlib import Path
from typing import TypedDict

__all__ = ["BuildRecord", "Feature", "build_record", "get_include", "get_library_dir"]

PACKAGE = Path(__file__).resolve().parent


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
    ``cc -I "$(python -c 'import nvmeio; print(nvmeio.get_include())')" ...``
    """
    # An editable install keeps the headers where the sources have them.
    for folder in (PACKAGE / "include", PACKAGE.parents[1] / "include"):
        if (folder / "nvmeio" / "nvmeio.h").is_file():
            return str(folder)
    raise FileNotFoundError(f"the headers of nvmeio are not in {PACKAGE / 'include'}")


def get_library_dir() -> str:
    """Return the folder of ``libnvmeio.a``, for C programs without Python.

    Returns
    -------
    str
        The folder to give to a linker.  ``build_info()["link_flags"]`` has the flags
        that must follow ``-lnvmeio``.

    Raises
    ------
    FileNotFoundError
        If the archive is not where this package was installed.

    Notes
    -----
    A Python extension must not link it: it would get a pool and fork handlers of its
    own.  It cimports ``nvmeio._core`` instead.
    """
    folder = PACKAGE / "lib"
    if not (folder / "libnvmeio.a").is_file():
        raise FileNotFoundError(f"libnvmeio.a is not in {folder}: build nvmeio first")
    return str(folder)


def build_record() -> BuildRecord:
    """Return what setup.py recorded when it built the library beside this file.

    Returns
    -------
    BuildRecord
        A new dictionary at each call.

    Raises
    ------
    FileNotFoundError
        If nvmeio was not built by its setup.py.
    """
    text = (Path(get_library_dir()) / "build.json").read_text(encoding="utf-8")
    record: BuildRecord = json.loads(text)
    return record
