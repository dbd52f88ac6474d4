"""DeepSpeed's async_io op on nvmeio's engine, and its place in an installed DeepSpeed.

The op is importable without DeepSpeed and without torch.  ``install()`` makes DeepSpeed
load it; so does ``NVMEIO_DEEPSPEED=1`` in the environment in which Python starts.
"""

from nvmeio._config.aio_json import aio_config, write_aio_config
from nvmeio._native.copy import deepspeed_memcpy
from nvmeio.deepspeed.builders import Installation, install, uninstall
from nvmeio.deepspeed.op import aio_handle, aio_read, aio_write, last_error
from nvmeio.deepspeed.pinned import pin_handle

__all__ = [
    "Installation",
    "aio_config",
    "aio_handle",
    "aio_read",
    "aio_write",
    "deepspeed_memcpy",
    "install",
    "last_error",
    "pin_handle",
    "uninstall",
    "write_aio_config",
]
