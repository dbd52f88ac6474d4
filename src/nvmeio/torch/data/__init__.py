"""Datasets of files, for torch's DataLoader and for ``BatchStream``."""

from nvmeio.torch.data._arrays import ArrayDataset
from nvmeio.torch.data._batches import BatchStream
from nvmeio.torch.data._mds import MDSDataset
from nvmeio.torch.data._megatron import MegatronDataset
from nvmeio.torch.data._records import RecordDataset
from nvmeio.torch.data._tar import TarDataset
from nvmeio.torch.data._tokens import TokenDataset

__all__ = [
    "ArrayDataset",
    "BatchStream",
    "MDSDataset",
    "MegatronDataset",
    "RecordDataset",
    "TarDataset",
    "TokenDataset",
]
