"""nvmeio under programs that import safetensors: stand-ins for the names that use files.

What works in memory alone (``load``, ``save``, ``serialize``, ``TensorSpec``, the helpers)
stays safetensors' own.  Each name has one stand-in for the life of the process, which is in
no module of nvmeio's: wherever a module has one, safetensors' name was there.
"""

import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

from nvmeio.safetensors import _open, _writing
from nvmeio.safetensors._errors import SafetensorError

__all__ = ["Installation", "follow_import", "install", "uninstall"]

# The release that the tests run with, whatever comes behind the second dot.
TESTED = "0.8"

# Which names have stand-ins, and the modules of nvmeio that have what they do.
BELOW = ("safe_open", "_safe_open_handle", "serialize_file")
FILES = ("load_file", "save_file")
MODELS = ("load_model", "save_model")
MODULES = {
    "safetensors": ("nvmeio.safetensors", BELOW),
    "safetensors.numpy": ("nvmeio.safetensors.numpy", FILES),
    "safetensors.torch": ("nvmeio.safetensors.torch", (*FILES, *MODELS)),
}
# What must be there too, though it stays.
KEPT = {"safetensors": ("SafetensorError", "TensorSpec")}

FRAMEWORKS = ("pt", "torch", "pytorch", "np", "numpy")
ON = ("1", "true", "yes", "on")

_lock = threading.RLock()
_current: "Installation | None" = None
_errors: dict[Any, type[SafetensorError]] = {}
# Pairs of safetensors' object and its stand-in, by the id of the first.
_pairs: dict[int, tuple[Any, Any]] = {}


class Installation:
    """What ``install()`` returns; leaving its ``with`` block uninstalls.

    Notes
    -----
    If nvmeio was installed before, leaving the block leaves it installed.  Of several
    threads the one that installed it ends it for all.

    Examples
    --------
    >>> with nvmeio.safetensors.install() as installed:
    ...     isinstance(installed, nvmeio.safetensors.Installation)
    True
    """

    def __enter__(self) -> "Installation":
        """Return this; nvmeio is installed already."""
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
    """Put nvmeio under programs that import safetensors.

    Returns
    -------
    Installation
        A context manager whose end uninstalls, unless nvmeio was installed before.

    Raises
    ------
    ModuleNotFoundError
        safetensors is not installed.
    RuntimeError
        This safetensors is of another version than 0.8, or lacks a name.  Says which;
        nothing was changed.

    Notes
    -----
    ``safe_open``, ``serialize_file``, ``load_file``, ``save_file``, ``load_model`` and
    ``save_model`` of ``safetensors``, ``safetensors.numpy`` and, if torch is installed,
    ``safetensors.torch`` are nvmeio's, and so they are in modules that imported them by
    name before.  safetensors' other functions use these, so they read and write through
    nvmeio too.  ``safe_open`` leaves other frameworks to safetensors.

    A symbolic link is replaced by the saved file, as safetensors does: the files that links
    in Hub's caches lead to must not change.  ``NVMEIO_SAFETENSORS=1`` in the environment in
    which Python starts does all this without a change to the program.

    Imports safetensors, and torch if it is installed.  Thread-safe; a second call changes
    nothing.

    Examples
    --------
    >>> import safetensors.numpy
    >>> with nvmeio.safetensors.install():
    ...     safetensors.numpy.save_file({"weight": np.arange(4)}, "model.safetensors")
    ...     safetensors.numpy.load_file("model.safetensors")
    {'weight': array([0, 1, 2, 3])}
    """
    global _current
    # Before the lock: another thread may be importing them, and come here for them.
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
    """Give safetensors its own functions back; without effect if it has them.

    Notes
    -----
    Modules that imported a name while nvmeio was installed get safetensors' own too.  Files
    that are open stay with nvmeio.

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
    """Install in a module that has just been executed, as NVMEIO_SAFETENSORS says.

    ``safetensors`` is always executed first.  Its submodules are left alone if the program
    has called ``uninstall()`` since then.
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
    """Refuse a safetensors whose functions may do something else."""
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
    """Refuse modules that lack a name."""
    for module in modules:
        _, names = MODULES[module.__name__]
        for name in (*names, *KEPT.get(module.__name__, ())):
            if not hasattr(module, name):
                raise _unknown(f"there is no {module.__name__}.{name}")


def _put(modules: list[ModuleType], ours: list[ModuleType]) -> None:
    """Put stand-ins wherever safetensors' names are, in whatever module."""
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
    """In all modules but nvmeio's, replace the first object of each pair by the second."""
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


def _raised(theirs: Any) -> type[SafetensorError]:
    """Return an error that callers of either package catch."""
    namespace = {"__doc__": SafetensorError.__doc__, "__module__": theirs.__module__}
    return type(theirs.__name__, (SafetensorError, theirs), namespace)


def _stand_in(ours: ModuleType, name: str, theirs: Any) -> Any:
    """Return what takes the place of a name of safetensors'."""
    mine = getattr(ours, name)
    if name == "safe_open":
        return _opening(theirs)
    if name == "_safe_open_handle":
        return _opening_handle(mine, theirs)
    if name in ("save_file", "serialize_file", "save_model"):
        return _replacing_links(mine)
    return _calling(mine)


class _Opening(type):
    """The class of the stand-in for safe_open, which leaves other frameworks alone."""

    theirs: Any

    def __call__(cls, filename: Any, framework: Any, *args: Any, **options: Any) -> Any:
        """Open a file."""
        if framework in FRAMEWORKS or not isinstance(framework, str):
            return super().__call__(filename, framework, *args, **options)
        return cls.theirs(filename, framework, *args, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Tell whether this is an open file: of nvmeio's, or of safetensors' own."""
        return isinstance(instance, cls.theirs) or super().__instancecheck__(instance)


def _opening(theirs: Any) -> Any:
    """Return a safe_open that leaves other frameworks to safetensors."""
    namespace = {"theirs": theirs, "__doc__": _open.safe_open.__doc__}
    namespace["__module__"] = __name__
    return _Opening("safe_open", (_open.safe_open,), namespace)


def _opening_handle(mine: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    """Return a _safe_open_handle that leaves other frameworks to safetensors."""

    @functools.wraps(mine)
    def opening(f: Any, framework: Any, *args: Any, **options: Any) -> Any:
        use = mine if framework in FRAMEWORKS else theirs
        return use(f, framework, *args, **options)

    return opening


def _calling(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, but is another object."""

    @functools.wraps(load)
    def calling(*args: Any, **options: Any) -> Any:
        return load(*args, **options)

    return calling


def _replacing_links(save: Callable[..., None]) -> Callable[..., None]:
    """Return a function that saves in the place of a link, not of what it leads to."""

    @functools.wraps(save)
    def replacing(*args: Any, **options: Any) -> None:
        with _writing.replacing_links():
            save(*args, **options)

    return replacing
