"""DeepSpeed's async_io op, implemented by nvmeio, and its installation into DeepSpeed.

The op can be imported without DeepSpeed and without torch.  ``install()`` makes DeepSpeed
load it, and so does ``NVMEIO_DEEPSPEED=1`` in the environment when Python starts.
"""

import typing as _typing
from importlib import import_module as _import_module

from nvmeio.deepspeed._op import deepspeed_memcpy
from nvmeio.deepspeed.op import aio_handle, aio_read, aio_write, last_error

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

# Imported on first use, because `import nvmeio` imports this package.
_MODULES = {
    "_aio_json": ("aio_config", "write_aio_config"),
    "builders": ("Installation", "install", "uninstall"),
    "pinned": ("pin_handle",),
}
if _typing.TYPE_CHECKING:
    from nvmeio.deepspeed._aio_json import aio_config, write_aio_config
    from nvmeio.deepspeed.builders import Installation, install, uninstall
    from nvmeio.deepspeed.pinned import pin_handle


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> _typing.Any:
    """Import a module on the first use of one of its names."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(_import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
