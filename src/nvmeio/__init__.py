"""Arrays and tensors to and from NVMe files, at the speed of the drive."""

import logging as _logging
from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import Any as _Any

from nvmeio._build import get_include, get_library_dir
from nvmeio.arrays import ArrayFile
from nvmeio.copy import deepspeed_memcpy, memcpy
from nvmeio.file import File
from nvmeio.files import aio_read, aio_write, read_file, read_into, write_file
from nvmeio.futures import as_completed, wait
from nvmeio.handle import aio_handle
from nvmeio.info import build_info, engines
from nvmeio.latencies import Latencies
from nvmeio.memory import empty
from nvmeio.npy_files import load, save
from nvmeio.pool import pool_stats
from nvmeio.records import GatherError
from nvmeio.request import Request

__all__ = [
    "ArrayFile",
    "File",
    "GatherError",
    "Latencies",
    "Request",
    "aio_handle",
    "aio_read",
    "aio_write",
    "as_completed",
    "build_info",
    "deepspeed_memcpy",
    "empty",
    "engines",
    "get_include",
    "get_library_dir",
    "load",
    "memcpy",
    "pool_stats",
    "read_file",
    "read_into",
    "save",
    "wait",
    "write_file",
]


def __getattr__(name: str) -> _Any:
    """Import nvmeio.torch and nvmeio.deepspeed when they are first asked for."""
    if name not in ("deepspeed", "torch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f"nvmeio.{name}")


# Silent unless the program wants to hear: Python would print warnings otherwise.
_logging.getLogger("nvmeio").addHandler(_logging.NullHandler())

__version__ = _version("nvmeio")
