"""All of nvmeio that imports torch.

Importing it teaches nvmeio to take tensors; nvmeio does so by itself when it meets the
first one.
"""

import torch

from nvmeio._registry import register
from nvmeio.torch import tensors

__all__ = ["tensors"]

register(torch.Tensor, tensors)
