"""Read and write model files in the safetensors format, at the speed of the drive.

``nvmeio.safetensors`` and its modules ``torch`` and ``numpy`` have the same functions as
the modules of the safetensors package, so changing an import is enough.  ``install()``
makes programs that import safetensors use nvmeio, without changes to them.
"""

from nvmeio._tensors.errors import SafetensorError
from nvmeio.safetensors._install import Installation, install, uninstall
from nvmeio.safetensors._open import TensorSlice, _safe_open_handle, safe_open
from nvmeio.safetensors._sharded import load_sharded, save_sharded
from nvmeio.safetensors._specs import TensorSpec, deserialize, serialize, serialize_file

__all__ = [
    "Installation",
    "SafetensorError",
    "TensorSlice",
    "TensorSpec",
    "_safe_open_handle",
    "deserialize",
    "install",
    "load_sharded",
    "safe_open",
    "save_sharded",
    "serialize",
    "serialize_file",
    "uninstall",
]
