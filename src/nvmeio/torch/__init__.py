"""All of nvmeio that imports torch.

Importing it teaches nvmeio to take tensors; nvmeio does so by itself when it meets the
first one.
"""

import torch

from nvmeio._registry import register
from nvmeio.torch import tensors
from nvmeio.torch.data import ArrayDataset, BatchStream, TokenDataset
from nvmeio.torch.memory import empty, empty_like

__all__ = [
    "ArrayDataset",
    "BatchStream",
    "TokenDataset",
    "empty",
    "empty_like",
    "tensors",
]

register(torch.Tensor, tensors)
