"""Checkpoints that survive a crash.

``Checkpointer`` saves and restores the state of a training run.  ``atomic_directory`` makes
any folder appear whole or not at all.  ``drain`` copies a folder to other storage, so that
it outlives its drive.
"""

from nvmeio.checkpoint._checkpointer import Checkpointer
from nvmeio.checkpoint._draining import drain
from nvmeio.checkpoint._errors import CheckpointError
from nvmeio.checkpoint._folders import atomic_directory, cleanup
from nvmeio.checkpoint._futures import SaveFuture

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "SaveFuture",
    "atomic_directory",
    "cleanup",
    "drain",
]
