"""DeepSpeed's async_io op, implemented by nvmeio, and its installation into DeepSpeed.

The op can be imported without DeepSpeed and without torch.  ``install()`` makes DeepSpeed
load it, and so does ``NVMEIO_DEEPSPEED=1`` in the environment when Python starts.
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
