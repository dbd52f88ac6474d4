"""Arrays and tensors to and from NVMe files, at the speed of the drive.

Whole files: ``read_file``, ``read_into``, ``write_file``; ``load`` and ``save`` for .npy.
Rows of an array in a file: ``ArrayFile``.  Many transfers at once, while the program
computes: ``Handle``, whose ``submit_read`` and ``submit_write`` return a ``Request``.

These modules are imported when they are first used:

- ``nvmeio.torch``: datasets, torch.save files, optimizers with states on a drive
- ``nvmeio.safetensors``: model files
- ``nvmeio.checkpoint``: checkpoints of a training run
- ``nvmeio.aio``: coroutine functions for asyncio
- ``nvmeio.deepspeed``: the async_io op of DeepSpeed
- ``nvmeio.profiles``: the settings that ``nvmeio tune`` has found

``help(nvmeio.Handle)``, for example, describes a name with its errors and an example.
"""

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module

from nvmeio._config.build import get_include, get_library_dir
from nvmeio._events.latencies import Latencies
from nvmeio._memory.registry import register_loader as _register_loader
from nvmeio._native.copy import memcpy
from nvmeio._native.file import File
from nvmeio._native.gather import GatherError
from nvmeio._native.handle import Handle
from nvmeio._native.info import build_info, engines
from nvmeio._native.info import version as _version
from nvmeio._native.pool import pool_stats, pool_trim
from nvmeio._native.request import Request
from nvmeio.arrays import ArrayFile
from nvmeio.configuration import show_config
from nvmeio.deepspeed._op import aio_handle, aio_read, aio_write, deepspeed_memcpy
from nvmeio.default import default_handle
from nvmeio.files import read_file, read_into, write_file
from nvmeio.futures import as_completed, wait
from nvmeio.memory import empty
from nvmeio.npy import load, save

__all__ = [
    "ArrayFile",
    "File",
    "GatherError",
    "Handle",
    "Latencies",
    "Request",
    "aio_handle",
    "aio_read",
    "aio_write",
    "as_completed",
    "build_info",
    "deepspeed_memcpy",
    "default_handle",
    "empty",
    "engines",
    "get_include",
    "get_library_dir",
    "load",
    "memcpy",
    "pool_stats",
    "pool_trim",
    "read_file",
    "read_into",
    "save",
    "show_config",
    "wait",
    "write_file",
]

_register_loader("torch", lambda: _import_module("nvmeio.torch"))

# Public modules, which are imported on first use.
_MODULES = ("aio", "checkpoint", "deepspeed", "profiles", "safetensors", "torch")
if _typing.TYPE_CHECKING:
    from nvmeio import aio as aio
    from nvmeio import checkpoint as checkpoint
    from nvmeio import deepspeed as deepspeed
    from nvmeio import profiles as profiles
    from nvmeio import safetensors as safetensors
    from nvmeio import torch as torch


def __dir__() -> list[str]:
    """List the public names only, so that completion does not offer private modules.

    Without torch, ``help(nvmeio)`` must not find a module that it cannot import.
    """
    missing = () if _has_torch() else ("torch",)
    return [*__all__, *(name for name in _MODULES if name not in missing), "__version__"]


def __getattr__(name: str) -> _typing.Any:
    """Import a public module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f"nvmeio.{name}")


def _has_torch() -> bool:
    """Return whether torch is imported or can be found."""
    from importlib.util import find_spec

    return _sys.modules.get("torch") is not None or find_spec("torch") is not None


__version__ = _version()
