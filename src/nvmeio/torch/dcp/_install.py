"""Programs that name a folder alone get nvmeio's readers and writers."""

from typing import Any

import torch
from torch.distributed.checkpoint import _storage_utils

from nvmeio.torch.dcp._reading import FileSystemReader
from nvmeio.torch.dcp._writing import FileSystemWriter

__all__ = ["install", "uninstall"]

_torchs: dict[str, Any] = {}


def install() -> None:
    """Have torch.distributed.checkpoint use these where it is given a `checkpoint_id`.

    Raises
    ------
    RuntimeError
        This version of torch finds its readers and writers in another way.

    Notes
    -----
    Once they are in use, another call changes nothing.

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
            raise RuntimeError(f"torch {torch.__version__} has no _storage_utils.{name}")
    for name, kind in ours.items():
        if getattr(_storage_utils, name) is not kind:
            _torchs[name] = getattr(_storage_utils, name)
            setattr(_storage_utils, name, kind)


def uninstall() -> None:
    """Have torch use its own again; where it does, that changes nothing.

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
