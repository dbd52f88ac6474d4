"""What children do whose environment the default handle is made by."""

import os

import nvmeio
from workloads.common import report


def default_handle_once(folder):
    """Change the environment before and after the handle is made."""
    os.environ["NVMEIO_ENGINE"] = "sync"
    os.environ["NVMEIO_QUEUE_DEPTH"] = "3"
    nvmeio.write_file(b"bytes", f"{folder}/file")
    os.environ["NVMEIO_QUEUE_DEPTH"] = "4"
    handle = nvmeio.default_handle()
    nvmeio.read_file(f"{folder}/file")
    report(
        {
            "engine": handle.engine,
            "depth": handle.queue_depth,
            "same": nvmeio.default_handle() is handle,
            "threads": handle.workers,
        }
    )
