"""Make an installed DeepSpeed load nvmeio's ops, and undo that.

All of DeepSpeed loads its ops through the classes AsyncIOBuilder and PinMemoryBuilder, so
two methods of each are replaced.  Everything is checked before anything is changed.
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
from nvmeio._events.log import log

__all__ = ["Installation", "install", "uninstall"]

# The release that `make test-deepspeed` tests, without the number after the second dot.
TESTED = "0.19"

# The names that programs may import from deepspeed.ops.aio.
NAMES = ("aio_read", "aio_write", "aio_handle", "deepspeed_memcpy")

# Values of NVMEIO_DEEPSPEED that enable it -> the argument `errors`.
WORDS = dict.fromkeys(("1", "true", "yes", "on", "status"), "status") | {"raise": "raise"}

Method = Callable[..., Any]

_lock = threading.RLock()
# The current installation, the builder that it changed (a DeepSpeed that is imported again
# has a new one), and how to undo it.
_current: "Installation | None" = None
_builder: Any = None
_undo = contextlib.ExitStack()
# Set in a thread that loads one of DeepSpeed's own ops, which needs the other own ops.
_native = threading.local()


class Installation:
    """The result of ``install()``, a context manager that uninstalls at its end.

    Attributes
    ----------
    errors : {"status", "raise"}
        Whether DeepSpeed gets -1 or an OSError if a transfer fails.

    Notes
    -----
    If nvmeio was installed before, by another ``install()`` or by the environment, it stays
    installed at the end of the block.  All threads share one DeepSpeed: when the thread
    that installed nvmeio leaves its block, nvmeio is uninstalled for all.

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
    """Forwards nvmeio's warnings and errors to DeepSpeed's logger, which shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("DeepSpeed")
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def install(*, errors: Literal["status", "raise"] | None = None) -> Installation:
    """Make the installed DeepSpeed use nvmeio.

    Parameters
    ----------
    errors : {"status", "raise"}, optional
        What DeepSpeed gets if a transfer fails: "status" returns -1, as DeepSpeed's
        contract says; "raise" raises OSError.  DeepSpeed ignores some of these -1, for
        example when it swaps in optimizer states, and continues with the old contents of
        the buffer.  Default: as installed already, else "status".

    Returns
    -------
    Installation
        A context manager that uninstalls at its end.

    Raises
    ------
    ModuleNotFoundError
        DeepSpeed is not installed.
    RuntimeError
        DeepSpeed's internals are unfamiliar: the message has its version and what is
        missing, and nothing was changed.  Or nvmeio is installed already with another value
        of ``errors``.
    ValueError
        ``errors`` is neither "status" nor "raise".

    Notes
    -----
    ``AsyncIOBuilder().load()`` then returns the module ``nvmeio.deepspeed``; with
    ``errors="raise"`` the module ``nvmeio``, whose handles take their defaults from the
    environment.  ``PinMemoryBuilder().load()`` returns a module with ``pin_handle``.
    ``is_compatible()`` returns True, and nothing is compiled.  This also affects builders
    that were imported before, but not op modules that they have loaded.
    ``deepspeed.ops.aio`` has the op's four names.  Warnings of nvmeio's logger also go to
    DeepSpeed's.  GDS is still DeepSpeed's own op.

    Logs a warning if this release of DeepSpeed was not tested, or if DeepSpeed has already
    loaded its own pin_memory op, whose memory is not pinned for nvmeio.

    Imports DeepSpeed.  Thread-safe.  A second call changes nothing, unless DeepSpeed was
    imported again meanwhile.

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
    # Import before taking the lock: another thread that is importing DeepSpeed may call
    # install() too.
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
                    "by NVMEIO_DEEPSPEED or an earlier install(); call uninstall() before "
                    f"installing it with {errors!r}"
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
    """Restore DeepSpeed's own ops; do nothing if nvmeio is not installed.

    Notes
    -----
    Handles and modules that programs have obtained meanwhile keep working.

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
    """Install as ``NVMEIO_DEEPSPEED`` says; called once DeepSpeed has imported builders."""
    value = os.environ.get("NVMEIO_DEEPSPEED", "")
    errors: Any = WORDS.get(value.strip().lower())
    if errors is None:
        raise ValueError(
            f"NVMEIO_DEEPSPEED is {value!r}; it must be 1, raise (then errors raise, "
            "instead of returning -1 as in DeepSpeed's contract), or 0"
        )
    install(errors=errors)


def _changes(
    builders: ModuleType, aio: ModuleType, errors: str
) -> Iterator[tuple[Any, str, Any]]:
    """Check everything, then yield owner, name and new value of each attribute."""
    # This package itself, which is imported by now.
    pinned = sys.modules[__package__]
    op = sys.modules["nvmeio"] if errors == "raise" else pinned
    # DeepSpeed before 0.19 and some accelerators have no PinMemoryBuilder.
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
    """Return the builders of an op: the accelerator's, and the general one if different."""
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
    """Return DeepSpeed's version, which may be unset while DeepSpeed is being imported."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _loading(native: Method, name: str, module: ModuleType) -> Method:
    """Return the new method ``load`` for an op's builder."""

    @functools.wraps(native)
    def load(self: Any, verbose: bool = False) -> Any:
        if name == self.NAME and not getattr(_native, "loading", False):
            return module
        # A builder that derives from this one, such as that of GDS, needs the native ops.
        before = getattr(_native, "loading", False)
        _native.loading = True
        try:
            return native(self, verbose)
        finally:
            _native.loading = before

    return load


def _compatible(native: Method, name: str) -> Method:
    """Return the new method ``is_compatible`` for an op's builder."""

    @functools.wraps(native)
    def is_compatible(self: Any, verbose: bool = False) -> Any:
        return name == self.NAME or native(self, verbose)

    return is_compatible


def _remark() -> None:
    """Warn of an untested release and of an op that was loaded too early."""
    if _version().split(".")[:2] != TESTED.split("."):
        log.warning("DeepSpeed %s was not tested with nvmeio, %s was", _version(), TESTED)
    # DeepSpeed stores its op there for the whole process.
    if getattr(sys, "_deepspeed_pin_memory_op_module", None) is not None:
        log.warning(
            "DeepSpeed loaded its own pin_memory op before nvmeio was installed: its "
            "memory is not pinned for nvmeio's handles; install nvmeio earlier"
        )


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo`` is closed."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(_remove, owner, name)
    setattr(owner, name, value)


def _remove(owner: Any, name: str) -> None:
    """Delete an attribute, unless another deleted it already."""
    with contextlib.suppress(AttributeError):
        delattr(owner, name)


def _agree(undo: contextlib.ExitStack) -> None:
    """Make ``deepspeed.ops.__compatible_ops__`` agree with the builders."""
    ops = vars(importlib.import_module("deepspeed.ops"))
    probed = ops.get("__compatible_ops__")
    if probed is None:
        # DeepSpeed fills it on first use, by asking the builders.  After uninstall() it
        # must ask again.
        undo.callback(ops.pop, "__compatible_ops__", None)
        return
    for name in {"async_io", "pin_memory"} & probed.keys():
        undo.callback(probed.__setitem__, name, probed[name])
        probed[name] = True


def _forward(undo: contextlib.ExitStack) -> None:
    """Show nvmeio's warnings and errors where DeepSpeed shows its own."""
    handler = _ToDeepSpeed(logging.WARNING)
    log.addHandler(handler)
    undo.callback(log.removeHandler, handler)
