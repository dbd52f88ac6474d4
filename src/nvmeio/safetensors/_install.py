"""Make programs that import safetensors use nvmeio: replace the functions that use files.

Functions that work in memory alone (``load``, ``save``, ``serialize``, ``TensorSpec``, the
helpers) are not replaced.  Each replaced function has one stand-in for the life of the
process.  A stand-in is never nvmeio's own function: so wherever one is found in a module,
safetensors' function was there before, and uninstall() can restore it.
"""

import copyreg
import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

from nvmeio._safetensors.writing import replacing_links
from nvmeio._tensors.errors import SafetensorError
from nvmeio.safetensors import _open

__all__ = ["Installation", "follow_import", "install", "uninstall"]

# The release that the tests run with; any patch release of it is accepted.
TESTED = "0.8"

# The names to replace in each module, and the module of nvmeio that has the replacements.
BELOW = ("safe_open", "_safe_open_handle", "serialize_file")
FILES = ("load_file", "save_file")
MODELS = ("load_model", "save_model")
MODULES = {
    "safetensors": ("nvmeio.safetensors", BELOW),
    "safetensors.numpy": ("nvmeio.safetensors.numpy", FILES),
    "safetensors.torch": ("nvmeio.safetensors.torch", (*FILES, *MODELS)),
}
# Names that are not replaced, but must exist.
KEPT = {"safetensors": ("SafetensorError", "TensorSpec")}

TORCH = ("pt", "torch", "pytorch")
FRAMEWORKS = (*TORCH, "np", "numpy")
ON = ("1", "true", "yes", "on")

_lock = threading.RLock()
_current: "Installation | None" = None
_errors: dict[Any, type[SafetensorError]] = {}
# Pairs of safetensors' object and its stand-in; the key is the id of the former.
_pairs: dict[int, tuple[Any, Any]] = {}


class Installation:
    """The context manager that ``install()`` returns; it uninstalls at the end.

    Notes
    -----
    If nvmeio was installed before, it stays installed.  With several threads, the end of
    the block that installed it uninstalls it for all threads.

    Examples
    --------
    >>> import safetensors
    >>> with nvmeio.safetensors.install() as installed:
    ...     isinstance(installed, nvmeio.safetensors.Installation)
    True
    """

    def __enter__(self) -> "Installation":
        """Return this object; ``install()`` has done the work."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Uninstall, unless nvmeio was installed before."""
        if self is _current:
            uninstall()


def install() -> Installation:
    """Make programs that import safetensors read and write through nvmeio.

    Returns
    -------
    Installation
        A context manager that uninstalls at the end, unless nvmeio was installed before.

    Raises
    ------
    ModuleNotFoundError
        safetensors is not installed.
    RuntimeError
        The version of safetensors is not 0.8, or one of its functions is missing.  The
        message names it; nothing was changed.

    Notes
    -----
    This replaces ``safe_open``, ``serialize_file``, ``load_file``, ``save_file``,
    ``load_model`` and ``save_model`` in ``safetensors``, ``safetensors.numpy`` and, if
    torch is installed, ``safetensors.torch``; also in modules that have imported them by
    name.  safetensors' other functions call these, so they use nvmeio too.  ``safe_open``
    still passes frameworks other than numpy and torch to safetensors.

    Torch tensors of a file that the page cache has whole are mapped, as by safetensors; see
    `mapped` of ``load_file``.  Other files are read.  safetensors copies what it returns to
    numpy or with ``backend="pread"``, so these files are read too.

    Saving to a symbolic link replaces the link, as safetensors does, because the links in
    the cache of the Hugging Face Hub lead to files that must not change.

    To install without changing the program, start Python with ``NVMEIO_SAFETENSORS=1`` in
    the environment.

    This imports safetensors, and torch if it is installed.  Thread-safe; a second call
    changes nothing.

    Examples
    --------
    >>> import safetensors.numpy
    >>> with nvmeio.safetensors.install():
    ...     safetensors.numpy.save_file({"weight": np.arange(4)}, "model.safetensors")
    ...     safetensors.numpy.load_file("model.safetensors")
    {'weight': array([0, 1, 2, 3])}
    """
    global _current
    # Import before taking the lock: another thread may hold the import lock of these
    # modules, and call follow_import(), which takes ours.
    importlib.import_module("safetensors")
    _check_version()
    has_torch = importlib.util.find_spec("torch") is not None
    modules = [
        importlib.import_module(name)
        for name in MODULES
        if has_torch or name != "safetensors.torch"
    ]
    _check_names(modules)
    ours = [_ours(module) for module in modules]
    with _lock:
        _put(modules, ours)
        done = Installation()
        _current = _current or done
    return done


def uninstall() -> None:
    """Restore safetensors' own functions; do nothing if nvmeio is not installed in it.

    Notes
    -----
    Also restores them in modules that imported a function while nvmeio was installed.
    Open files continue to use nvmeio.

    Examples
    --------
    >>> import safetensors
    >>> installed = nvmeio.safetensors.install()
    >>> nvmeio.safetensors.uninstall()
    """
    global _current
    with _lock:
        _current = SafetensorError._raised = None
        _swap({id(mine): (mine, theirs) for theirs, mine in _pairs.values()})


def follow_import(module: ModuleType) -> None:
    """Install in a module that was just imported, because NVMEIO_SAFETENSORS is set.

    ``safetensors`` is always imported before its submodules.  They are left alone if the
    program has called ``uninstall()`` since then.
    """
    global _current
    value = os.environ.get("NVMEIO_SAFETENSORS", "")
    if value.strip().lower() not in ON:
        raise ValueError(f"NVMEIO_SAFETENSORS is {value!r}; it must be 1 or 0")
    is_first = module.__name__ == "safetensors"
    if not is_first and _current is None:
        return
    try:
        _check_version()
        _check_names([module])
    except RuntimeError:
        uninstall()
        raise
    ours = _ours(module)
    with _lock:
        if is_first or _current is not None:
            _put([module], [ours])
            _current = _current or Installation()


def _check_version() -> None:
    """Raise RuntimeError if the version of safetensors is not the tested one."""
    version = getattr(sys.modules["safetensors"], "__version__", "of unknown version")
    if version.split(".")[:2] != TESTED.split("."):
        raise _unknown(f"it must be {TESTED}")


def _unknown(what: str) -> RuntimeError:
    version = getattr(sys.modules["safetensors"], "__version__", "of unknown version")
    return RuntimeError(
        f"nvmeio cannot be installed in safetensors {version}: {what}. Nothing was changed"
    )


def _ours(module: ModuleType) -> ModuleType:
    return importlib.import_module(MODULES[module.__name__][0])


def _check_names(modules: list[ModuleType]) -> None:
    """Raise RuntimeError if a module lacks one of the names."""
    for module in modules:
        _, names = MODULES[module.__name__]
        for name in (*names, *KEPT.get(module.__name__, ())):
            if not hasattr(module, name):
                raise _unknown(f"there is no {module.__name__}.{name}")


def _put(modules: list[ModuleType], ours: list[ModuleType]) -> None:
    """Replace safetensors' functions by their stand-ins, in all loaded modules."""
    mine = {id(each) for _, each in _pairs.values()}
    pairs = {}
    for module, source in zip(modules, ours, strict=True):
        for name in MODULES[module.__name__][1]:
            theirs = getattr(module, name)
            if id(theirs) not in mine:
                pair = _pairs.get(id(theirs))
                pairs[id(theirs)] = pair or (theirs, _stand_in(source, name, theirs))
    safetensors = sys.modules["safetensors"]
    theirs = safetensors.SafetensorError
    if theirs not in _errors:
        _errors[theirs] = _raised(theirs)
    SafetensorError._raised = _errors[theirs]
    _pairs.update(pairs)
    _swap(_pairs)


def _swap(pairs: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace the first object of each pair by the second, in all modules but nvmeio's."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        if str(names.get("__name__")).partition(".")[0] == "nvmeio":
            continue
        for name, value in list(names.items()):
            before, after = pairs.get(id(value), (None, None))
            if before is value and before is not None:
                names[name] = after


class _Raised(type):
    """The class of an error that ``except`` clauses of both packages catch.

    It has the name of safetensors' own, so pickle, by which workers pass errors on, would
    not find it by that.
    """


def _raised(theirs: Any) -> type[SafetensorError]:
    namespace = {"__doc__": SafetensorError.__doc__, "__module__": theirs.__module__}
    made: Any = _Raised(theirs.__name__, (SafetensorError, theirs), namespace)
    found: type[SafetensorError] = made
    return found


def _class_raised() -> type[SafetensorError]:
    """Return the class of errors in this process, where install() may not be called."""
    return SafetensorError._raised or SafetensorError


_reduced: Any = (_class_raised, ())
copyreg.pickle(_Raised, lambda _: _reduced)


def _stand_in(ours: ModuleType, name: str, theirs: Any) -> Any:
    """Return the stand-in for a name of safetensors."""
    mine = getattr(ours, name)
    if name == "safe_open":
        return _opening(theirs)
    if name == "_safe_open_handle":
        return _opening_handle(mine, theirs)
    if name in ("save_file", "serialize_file", "save_model"):
        return _replacing_links(mine)
    return _calling(mine, "np" if ours.__name__ == "nvmeio.safetensors.numpy" else "pt")


class _Opening(type):
    """The metaclass of the stand-in for safe_open."""

    theirs: Any

    def __call__(cls, filename: Any, framework: Any, *args: Any, **options: Any) -> Any:
        """Open a file with nvmeio, or with safetensors for frameworks that nvmeio lacks."""
        if framework in FRAMEWORKS or not isinstance(framework, str):
            options = _mapping(framework, options)
            return super().__call__(filename, framework, *args, **options)
        return cls.theirs(filename, framework, *args, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether this is an open file of nvmeio or of safetensors."""
        return isinstance(instance, cls.theirs) or super().__instancecheck__(instance)


def _opening(theirs: Any) -> Any:
    """Return a safe_open that passes other frameworks to safetensors."""
    namespace = {"theirs": theirs, "__doc__": _open.safe_open.__doc__}
    namespace["__module__"] = __name__
    return _Opening("safe_open", (_open.safe_open,), namespace)


def _opening_handle(mine: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    """Return a _safe_open_handle that passes other frameworks to safetensors."""

    @functools.wraps(mine)
    def opening(f: Any, framework: Any, *args: Any, **options: Any) -> Any:
        if framework in FRAMEWORKS:
            return mine(f, framework, *args, **_mapping(framework, options))
        return theirs(f, framework, *args, **options)

    return opening


def _mapping(framework: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with which cached files are mapped where safetensors maps files."""
    maps = framework in TORCH and options.get("backend", "mmap") == "mmap"
    return {"mapped": "auto", **options} if maps else options


def _calling(load: Callable[..., Any], framework: str) -> Callable[..., Any]:
    """Return a stand-in for load_file or load_model."""

    @functools.wraps(load)
    def calling(*args: Any, **options: Any) -> Any:
        return load(*args, **_mapping(framework, options))

    return calling


def _replacing_links(save: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper that replaces a symbolic link instead of the file it leads to."""

    @functools.wraps(save)
    def replacing(*args: Any, **options: Any) -> None:
        with replacing_links():
            save(*args, **options)

    return replacing
