"""Make nvmeio's readers and writers the default of torch.distributed.checkpoint."""

import os
from typing import Any

import torch
from torch.distributed.checkpoint import _storage_utils, state_dict_saver

from nvmeio._arguments.checks import flag
from nvmeio.torch.dcp._reading import FileSystemReader
from nvmeio.torch.dcp._writing import FileSystemWriter

__all__ = ["install", "uninstall"]

_torchs: dict[str, Any] = {}
_EXECUTOR = "_ProcessBasedAsyncCheckpointExecutor"


class _AnyReader(FileSystemReader):
    """A reader that unpickles anything, unless it is told otherwise."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        weights_only: bool = False,
    ) -> None:
        super().__init__(path, _extension_registry, weights_only=weights_only)


class _Executor:
    """Passes torch's executor of async_save() the writer of this process.

    In the process that saves, install() may not have been called.
    """

    def __init__(self) -> None:
        self._theirs = _torchs[_EXECUTOR]()

    def execute_save(
        self,
        state: Any,
        *,
        checkpoint_id: Any = None,
        storage_writer: Any = None,
        **options: Any,
    ) -> Any:
        """Save a state in torch's process for checkpoints; return its Future."""
        if storage_writer is None:
            setup = _storage_utils._storage_setup
            storage_writer = setup(None, checkpoint_id, reader=False)
        return self._theirs.execute_save(
            state, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **options
        )


def install(*, weights_only: bool = True) -> None:
    """Make torch.distributed.checkpoint use nvmeio if it is given only a `checkpoint_id`.

    Parameters
    ----------
    weights_only : bool, default True
        As for `FileSystemReader`.  With False, a file can run any code.

    Raises
    ------
    RuntimeError
        This version of torch is not supported; nothing was changed.

    Notes
    -----
    A second call changes only `weights_only`.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed import checkpoint
    >>> import nvmeio.torch.dcp
    >>> nvmeio.torch.dcp.install()
    >>> saved = checkpoint.save({"weight": torch.arange(4)}, checkpoint_id="step-100")
    >>> nvmeio.torch.dcp.uninstall()
    """
    reader = FileSystemReader if flag("weights_only", weights_only) else _AnyReader
    ours = {"FileSystemReader": reader, "FileSystemWriter": FileSystemWriter}
    for name in ours:
        if not hasattr(_storage_utils, name):
            raise RuntimeError(
                f"torch {torch.__version__} is not supported: it has no _storage_utils."
                f"{name}; pass storage_reader and storage_writer instead"
            )
    for name, kind in ours.items():
        found = getattr(_storage_utils, name)
        if found not in (FileSystemReader, _AnyReader, FileSystemWriter):
            _torchs[name] = found
        setattr(_storage_utils, name, kind)
    # Versions without it save by threads only.
    theirs = getattr(state_dict_saver, _EXECUTOR, None)
    if theirs is not None and _EXECUTOR not in _torchs:
        _torchs[_EXECUTOR] = theirs
        setattr(state_dict_saver, _EXECUTOR, _Executor)


def uninstall() -> None:
    """Make torch use its own readers and writers again; do nothing if it does.

    Examples
    --------
    >>> import torch
    >>> import nvmeio.torch.dcp
    >>> nvmeio.torch.dcp.install()
    >>> nvmeio.torch.dcp.uninstall()
    """
    for name, kind in _torchs.items():
        setattr(state_dict_saver if name == _EXECUTOR else _storage_utils, name, kind)
    _torchs.clear()
