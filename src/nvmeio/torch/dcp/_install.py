"""Make nvmeio's readers and writers the default of torch.distributed.checkpoint."""

from typing import Any

import torch
from torch.distributed.checkpoint import _storage_utils

from nvmeio.torch.dcp._reading import FileSystemReader
from nvmeio.torch.dcp._writing import FileSystemWriter

__all__ = ["install", "uninstall"]

_torchs: dict[str, Any] = {}


def install() -> None:
    """Make torch.distributed.checkpoint use nvmeio if it is given only a `checkpoint_id`.

    Raises
    ------
    RuntimeError
        This version of torch is not supported; nothing was changed.

    Notes
    -----
    A second call changes nothing.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed import checkpoint
    >>> import nvmeio.torch.dcp
    >>> nvmeio.torch.dcp.install()
    >>> saved = checkpoint.save({"weight": torch.arange(4)}, checkpoint_id="step-100")
    >>> nvmeio.torch.dcp.uninstall()
    """
    ours = {"FileSystemReader": FileSystemReader, "FileSystemWriter": FileSystemWriter}
    for name in ours:
        if not hasattr(_storage_utils, name):
            raise RuntimeError(
                f"torch {torch.__version__} is not supported: it has no _storage_utils."
                f"{name}; pass storage_reader and storage_writer instead"
            )
    for name, kind in ours.items():
        if getattr(_storage_utils, name) is not kind:
            _torchs[name] = getattr(_storage_utils, name)
            setattr(_storage_utils, name, kind)


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
        setattr(_storage_utils, name, kind)
    _torchs.clear()
