"""The part of nvmeio that imports torch.

``load`` and ``save`` read and write files of torch.save.  ``ArrayDataset``,
``TokenDataset`` and others feed a DataLoader or a ``BatchStream``.  ``offload`` keeps the
states of an optimizer on a drive, and ``save_on_disk`` the tensors that the forward pass
saves.

nvmeio imports this module by itself when it is given the first tensor.
"""

import torch

from nvmeio._memory.registry import register
from nvmeio.torch import _tensors
from nvmeio.torch.activations import save_on_disk
from nvmeio.torch.data import (
    ArrayDataset,
    BatchStream,
    MDSDataset,
    MegatronDataset,
    RecordDataset,
    TarDataset,
    TokenDataset,
)
from nvmeio.torch.embedding import DiskEmbedding
from nvmeio.torch.memory import empty, empty_like
from nvmeio.torch.optimizers import OffloadedOptimizer, offload
from nvmeio.torch.serialization import load, save
from nvmeio.torch.weights import (
    disk_offload,
    disk_stats,
    load_disk_offload,
    remove_disk_offload,
)

__all__ = [
    "ArrayDataset",
    "BatchStream",
    "DiskEmbedding",
    "MDSDataset",
    "MegatronDataset",
    "OffloadedOptimizer",
    "RecordDataset",
    "TarDataset",
    "TokenDataset",
    "disk_offload",
    "disk_stats",
    "empty",
    "empty_like",
    "load",
    "load_disk_offload",
    "offload",
    "remove_disk_offload",
    "save",
    "save_on_disk",
]

register(torch.Tensor, _tensors)
