"""Checkpoints of Lightning by nvmeio: ``Trainer(plugins=[CheckpointIO()])``."""

import importlib
import os
import shutil
from typing import Any

from nvmeio._files.folders import make_folders
from nvmeio.torch.serialization import load, save

__all__ = ["CheckpointIO"]


def _bases() -> tuple[Any, ...]:
    """Return the class that plugins are of, of each of the packages that have it."""
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
        words = "neither lightning nor pytorch_lightning is installed"
        raise ModuleNotFoundError(words, name="lightning")
    return tuple(found)


class CheckpointIO(*_bases()):  # type: ignore[misc]
    """Saves and loads the checkpoints of a Trainer; the files are Lightning's own.

    A file is replaced as a whole and durably, where Lightning writes a temporary one
    elsewhere and copies it; it is read past the page cache.  It is for local files: to have
    them on a store, ``nvmeio.checkpoint.drain`` copies them there.

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
        """Save what the Trainer gives; it is on the device when this returns."""
        if storage_options is not None:
            raise TypeError(
                f"storage_options is {storage_options!r:.100}; local files take no options"
            )
        name = _local(path)
        make_folders(os.path.dirname(os.path.abspath(name)))
        save(checkpoint, name)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        """Load a checkpoint; by default without running what it says, as torch.load."""
        name = _local(path)
        if not os.path.exists(name):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        safe = True if weights_only is None else weights_only
        return load(name, map_location=map_location, weights_only=safe)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, if it is there."""
        name = _local(path)
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        elif os.path.lexists(name):
            os.unlink(name)


def _local(path: Any) -> str:
    name = os.fsdecode(path)
    if "://" in name and not name.startswith("file://"):
        raise ValueError(
            f"{name!r} is not a local file; copy to it with nvmeio.checkpoint.drain"
        )
    return name.removeprefix("file://")
