"""A plug-in for checkpoints of Lightning: ``Trainer(plugins=[CheckpointIO()])``."""

import importlib
import os
from typing import Any

from nvmeio._files.folders import make_folders
from nvmeio._files.paths import exists, refuse_url
from nvmeio._native.descriptor import remove_tree
from nvmeio.torch.serialization import load, save_to

__all__ = ["CheckpointIO"]


def _bases() -> tuple[Any, ...]:
    """Return the base class of plug-ins, from each installed package that has it."""
    found = []
    for package in ("lightning.fabric", "lightning_fabric"):
        try:
            plugins = importlib.import_module(f"{package}.plugins.io.checkpoint_io")
        except ModuleNotFoundError as error:
            if not package.startswith((error.name or "?").partition(".")[0]):
                raise
        else:
            found.append(plugins.CheckpointIO)
    if not found:
        words = "neither lightning nor pytorch_lightning is installed; install one of them"
        raise ModuleNotFoundError(words, name="lightning")
    return tuple(found)


class CheckpointIO(*_bases()):  # type: ignore[misc]
    """Save and load the checkpoints of a Trainer, in Lightning's own file format.

    Notes
    -----
    A file is replaced atomically and durably.  Lightning itself writes a temporary file
    elsewhere and copies it.  Reading bypasses the page cache.  Only local files are
    supported; use ``nvmeio.checkpoint.drain`` to copy them to a store.

    Examples
    --------
    >>> import lightning
    >>> import nvmeio.torch.lightning
    >>> import torch
    >>> plugin = nvmeio.torch.lightning.CheckpointIO()
    >>> plugin.save_checkpoint({"weight": torch.ones(3), "epoch": 3}, "last.ckpt")
    >>> plugin.load_checkpoint("last.ckpt")["epoch"]
    3
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, and return when it is on the device.

        Parameters
        ----------
        checkpoint : dict
            The checkpoint of the Trainer.
        path : str or os.PathLike
            The local file to write; missing folders are created.
        storage_options : None
            Must be None, because local files take no options.

        Raises
        ------
        TypeError, ValueError
            `storage_options` is given, or `path` is a URL.
        OSError
            Writing failed; has errno and path.  The old file is unchanged.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options is {storage_options!r:.100}; it must be None, because "
                "local files take no options"
            )
        name = _local(path)
        make_folders(os.path.dirname(os.path.abspath(name)))
        # As Lightning does: ``last.ckpt`` may be a link to the best checkpoint.
        save_to(checkpoint, name, follow=False)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> Any:
        """Load a checkpoint.

        Parameters
        ----------
        path : str or os.PathLike
            The local file to read.
        map_location : default "cpu"
            As for ``torch.load``.  A Trainer passes none: each of its processes would load
            all tensors to the device of the one that saved, such as ``cuda:0``.
        weights_only : bool, optional
            As for ``torch.load``; by default True, so that no code in the file is run.

        Returns
        -------
        dict
            The checkpoint.

        Raises
        ------
        FileNotFoundError
            The file does not exist.
        OSError, Exception
            As ``nvmeio.torch.load``.
        """
        name = _local(path)
        if not exists(name, follow=True):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        safe = True if weights_only is None else weights_only
        return load(name, map_location=map_location, weights_only=safe)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, if it exists.

        Parameters
        ----------
        path : str or os.PathLike
            The local file or folder.
        """
        name = _local(path)
        if os.path.isdir(name) and not os.path.islink(name):
            remove_tree(name)
        elif exists(name):
            os.unlink(name)


def _local(path: Any) -> str:
    name = os.fsdecode(path)
    if not name.startswith("file://"):
        refuse_url("path", name, "save locally, and copy with nvmeio.checkpoint.drain")
    return name.removeprefix("file://")
