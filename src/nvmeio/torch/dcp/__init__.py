"""torch.distributed.checkpoint on nvmeio: torch's files, durable, and read in part.

The writers and readers take torch's arguments; torch reads what they have written, and they
read what torch has.
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
