"""Model files: safetensors at the speed of the drive, by changing one import.

``nvmeio.safetensors``, ``.torch`` and ``.numpy`` have the names of safetensors' own
modules; ``install()`` puts them under programs that import those.
"""

from nvmeio.safetensors._errors import SafetensorError
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
