"""Writers and readers for torch.distributed.checkpoint, in torch's own file formats.

They take the arguments of torch's writers and readers.  Files are durable, and only the
needed parts are read.  Checkpoints of nvmeio and torch can be read by either.
"""

from nvmeio.torch.dcp._install import install, uninstall
from nvmeio.torch.dcp._model_reading import HuggingFaceStorageReader
from nvmeio.torch.dcp._model_writing import HuggingFaceStorageWriter
from nvmeio.torch.dcp._reading import FileSystemReader
from nvmeio.torch.dcp._staging import PoolStager
from nvmeio.torch.dcp._writing import FileSystemWriter

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "PoolStager",
    "install",
    "uninstall",
]
