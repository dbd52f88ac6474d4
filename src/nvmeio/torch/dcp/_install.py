"""Make nvmeio's readers and writers the default of torch.distributed.checkpoint."""

import os
from typing import Any

import torch
from torch.distributed.checkpoint import _storage_utils, state_dict_saver

from nvmeio._arguments.checks import flag
from nvmeio.torch.dcp._reading import FileSystemReader
from nvmeio.torch.dcp._writing import FileSystemWriter

__all__ = ["install", "uninstall"]

# By module and name.
_torchs: dict[tuple[Any, str], Any] = {}
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
        self._theirs = _torchs[state_dict_saver, _EXECUTOR]()

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
            # A relative one is another folder in that process.
            checkpoint_id = storage_writer.path
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
    places: dict[tuple[Any, str], Any]
    places = {(_storage_utils, name): kind for name, kind in ours.items()}
    # Versions without it save by threads only.
    if hasattr(state_dict_saver, _EXECUTOR):
        places[state_dict_saver, _EXECUTOR] = _Executor
    for (module, name), kind in places.items():
        found = getattr(module, name)
        if found not in (FileSystemReader, _AnyReader, FileSystemWriter, _Executor):
            _torchs[module, name] = found
        setattr(module, name, kind)


def uninstall() -> None:
    """Make torch use its own readers and writers again; do nothing if it does.

    Examples
    --------
    >>> import torch
    >>> import nvmeio.torch.dcp
    >>> nvmeio.torch.dcp.install()
    >>> nvmeio.torch.dcp.uninstall()
    """
    for (module, name), kind in _torchs.items():
        setattr(module, name, kind)
    _torchs.clear()
