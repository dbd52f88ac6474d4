"""nvmeio in an installed DeepSpeed: what its op builders load, and back again.

Every part of DeepSpeed comes to its ops by the classes AsyncIOBuilder and PinMemoryBuilder,
so their two methods are what is replaced.  All is looked at before anything is changed.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any, Literal

from nvmeio._arguments.checks import word

__all__ = ["Installation", "install", "uninstall"]

# The release that `make test-deepspeed` runs with, whatever comes behind the second dot.
TESTED = "0.19"

# What may be imported from deepspeed.ops.aio itself.
NAMES = ("aio_read", "aio_write", "aio_handle", "deepspeed_memcpy")

# What NVMEIO_DEEPSPEED may be, where it is on.
WORDS = dict.fromkeys(("1", "true", "yes", "on", "status"), "status") | {"raise": "raise"}

Method = Callable[..., Any]

_log = logging.getLogger("nvmeio")
_lock = threading.RLock()
# What is installed, in which builder (a DeepSpeed that is imported anew has another), and
# how to undo it.
_current: "Installation | None" = None
_builder: Any = None
_undo = contextlib.ExitStack()
# Set in a thread that loads an op of DeepSpeed which is linked to its other ops.
_native = threading.local()


class Installation:
    """What ``install()`` returns; leaving its ``with`` block uninstalls.

    Attributes
    ----------
    errors : {"status", "raise"}
        What DeepSpeed gets for errors of the system.

    Notes
    -----
    Where nvmeio was installed before, by another ``install()`` or by the environment,
    leaving the block leaves it installed.  There is one DeepSpeed in a process: of several
    threads the one that installed it ends it for all.

    Examples
    --------
    >>> import deepspeed
    >>> with nvmeio.deepspeed.install() as installed:
    ...     isinstance(installed, nvmeio.deepspeed.Installation)
    True
    """

    def __init__(self, errors: Literal["status", "raise"]) -> None:
        self.errors = errors

    def __enter__(self) -> "Installation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self is _current:
            uninstall()


class _ToDeepSpeed(logging.Handler):
    """Hands nvmeio's warnings and errors to DeepSpeed's logger, which shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("DeepSpeed")
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def install(*, errors: Literal["status", "raise"] | None = None) -> Installation:
    """Make the installed DeepSpeed use nvmeio.

    Parameters
    ----------
    errors : {"status", "raise"}, optional
        What DeepSpeed gets for errors of the system: -1, as its contract has it, or
        OSError.  DeepSpeed ignores some of the -1: the swapping in of optimizer states
        goes on with what the buffer held.  By default as it is installed already, else
        "status".

    Returns
    -------
    Installation
        A context manager whose end uninstalls.

    Raises
    ------
    ModuleNotFoundError
        DeepSpeed is not installed.
    RuntimeError
        This DeepSpeed is not built as nvmeio knows it; says its version and what is
        missing, and nothing was changed.  Or nvmeio is installed already, with other
        ``errors``.
    ValueError
        ``errors`` is neither of the two.

    Notes
    -----
    ``AsyncIOBuilder().load()`` returns the module ``nvmeio.deepspeed``, with
    ``errors="raise"`` the module ``nvmeio``, whose handles have the defaults that the
    environment gives them, and ``PinMemoryBuilder().load()`` one with
    ``pin_handle``; ``is_compatible()`` is True, and nothing is compiled.  Who imported the
    classes before sees that too, but modules that were loaded before stay what they are.
    ``deepspeed.ops.aio`` has the op's four names, and warnings of nvmeio's logger go to
    DeepSpeed's as well.  GDS stays DeepSpeed's.

    A release of DeepSpeed that was not tested is logged as a warning, and so is one that
    has loaded its own pin_memory op before: what that has pinned is not pinned for nvmeio.

    Imports DeepSpeed.  Thread-safe; a second call changes nothing, unless DeepSpeed was
    imported anew meanwhile.

    Examples
    --------
    >>> import deepspeed
    >>> from deepspeed.ops.op_builder import AsyncIOBuilder
    >>> with nvmeio.deepspeed.install():
    ...     AsyncIOBuilder().load() is nvmeio.deepspeed
    True
    """
    global _current, _builder
    if errors is not None:
        word("errors", errors, ("status", "raise"))
    # Before the lock: another thread may be importing DeepSpeed, and come here for it.
    try:
        builders = importlib.import_module("deepspeed.ops.op_builder")
        aio = importlib.import_module("deepspeed.ops.aio")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("deepspeed."):
            raise
        raise _unknown(str(error)) from error
    builder = getattr(builders, "AsyncIOBuilder", None)
    with _lock:
        if _current is not None and _builder is not builder:
            errors = errors or _current.errors
            uninstall()
        if _current is not None:
            if errors not in (None, _current.errors):
                raise RuntimeError(
                    f"nvmeio is installed in DeepSpeed with errors={_current.errors!r}, "
                    "as NVMEIO_DEEPSPEED or an earlier install() had it; call uninstall() "
                    f"before installing it with {errors!r}"
                )
            return Installation(_current.errors)
        done = Installation(errors or "status")
        changes = [*_changes(builders, aio, done.errors)]
        with contextlib.ExitStack() as undo:
            for owner, name, value in changes:
                _replace(undo, owner, name, value)
            _agree(undo)
            _forward(undo)
            _undo.push(undo.pop_all())
        _current, _builder = done, builder
    _remark()
    return done


def uninstall() -> None:
    """Give DeepSpeed its own ops back; without effect where nvmeio is not installed.

    Notes
    -----
    Handles that were made meanwhile go on, and so do modules that were loaded.

    Examples
    --------
    >>> import deepspeed
    >>> installed = nvmeio.deepspeed.install()
    >>> nvmeio.deepspeed.uninstall()
    """
    global _current, _builder
    with _lock:
        _current = _builder = None
        _undo.close()


def install_for_environment() -> None:
    """Install as ``NVMEIO_DEEPSPEED`` says; called once DeepSpeed has its builders."""
    value = os.environ.get("NVMEIO_DEEPSPEED", "")
    errors: Any = WORDS.get(value.strip().lower())
    if errors is None:
        raise ValueError(
            f"NVMEIO_DEEPSPEED is {value!r}; it must be 1, raise (then errors raise, where "
            "DeepSpeed's contract returns -1), or 0"
        )
    install(errors=errors)


def _changes(
    builders: ModuleType, aio: ModuleType, errors: str
) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and new value of each attribute, once all have been looked at."""
    # This package itself, which has been imported by now.
    pinned = sys.modules[__package__]
    op = importlib.import_module("nvmeio") if errors == "raise" else pinned
    # DeepSpeed before 0.19 has no PinMemoryBuilder, and some accelerators have none.
    found = {
        "async_io": (op, _classes(builders, "AsyncIOBuilder", "async_io")),
        "pin_memory": (pinned, _classes(builders, "PinMemoryBuilder", "pin_memory")),
    }
    if not found["async_io"][1]:
        instead = getattr(builders, "AsyncIOBuilder", None)
        raise _unknown(f"this accelerator's AsyncIOBuilder is {instead!r}")
    for name in NAMES:
        yield aio, name, getattr(op, name)
    for name, (module, kinds) in found.items():
        for kind in kinds:
            yield kind, "load", _loading(kind.load, name, module)
            yield kind, "is_compatible", _compatible(kind.is_compatible, name)


def _classes(builders: ModuleType, name: str, op: str) -> list[Any]:
    """Return the builders of an op: the accelerator's, then a general one that differs."""
    chosen = getattr(builders, name, None)
    if getattr(chosen, "NAME", None) != op:
        return []
    general = getattr(getattr(builders, op, None), name, chosen)
    found = [chosen] if general is chosen else [chosen, general]
    for kind in found:
        for method in ("load", "is_compatible"):
            parameters = [*inspect.signature(getattr(kind, method)).parameters]
            if parameters != ["self", "verbose"]:
                place = f"{kind.__module__}.{name}.{method}"
                raise _unknown(f"{place} takes ({', '.join(parameters)})")
    return found


def _unknown(what: str) -> RuntimeError:
    return RuntimeError(
        f"nvmeio cannot be installed in DeepSpeed {_version()}: {what}. Nothing was "
        f"changed; nvmeio was tested with DeepSpeed {TESTED}"
    )


def _version() -> str:
    """Return DeepSpeed's version; it may be halfway through its import."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _loading(native: Method, name: str, module: ModuleType) -> Method:
    """Return the method ``load`` of an op's builder."""

    @functools.wraps(native)
    def load(self: Any, verbose: bool = False) -> Any:
        if name == self.NAME and not getattr(_native, "loading", False):
            return module
        # An op that derives from this one, as GDS does, is linked to the native ones.
        before = getattr(_native, "loading", False)
        _native.loading = True
        try:
            return native(self, verbose)
        finally:
            _native.loading = before

    return load


def _compatible(native: Method, name: str) -> Method:
    """Return the method ``is_compatible`` of an op's builder."""

    @functools.wraps(native)
    def is_compatible(self: Any, verbose: bool = False) -> Any:
        return name == self.NAME or native(self, verbose)

    return is_compatible


def _remark() -> None:
    """Warn of what may not go as expected."""
    if _version().split(".")[:2] != TESTED.split("."):
        _log.warning("DeepSpeed %s was not tested with nvmeio, %s was", _version(), TESTED)
    # DeepSpeed keeps it there for the process.
    if getattr(sys, "_deepspeed_pin_memory_op_module", None) is not None:
        _log.warning(
            "DeepSpeed loaded its own pin_memory op before nvmeio was installed: what that "
            "has pinned is not pinned for nvmeio's handles; install nvmeio earlier"
        )


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo`` is closed."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(_remove, owner, name)
    setattr(owner, name, value)


def _remove(owner: Any, name: str) -> None:
    """Delete an attribute, which somebody may have taken away meanwhile."""
    with contextlib.suppress(AttributeError):
        delattr(owner, name)


def _agree(undo: contextlib.ExitStack) -> None:
    """Let ``deepspeed.ops.__compatible_ops__`` tell what the builders do."""
    ops = vars(importlib.import_module("deepspeed.ops"))
    probed = ops.get("__compatible_ops__")
    if probed is None:
        # DeepSpeed asks the builders when it is first looked at; then it must ask again.
        undo.callback(ops.pop, "__compatible_ops__", None)
        return
    for name in {"async_io", "pin_memory"} & probed.keys():
        undo.callback(probed.__setitem__, name, probed[name])
        probed[name] = True


def _forward(undo: contextlib.ExitStack) -> None:
    """Show nvmeio's warnings and errors where DeepSpeed shows its own."""
    handler = _ToDeepSpeed(logging.WARNING)
    _log.addHandler(handler)
    undo.callback(_log.removeHandler, handler)
