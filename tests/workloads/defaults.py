"""The default handle, which the environment of a process configures."""

import os

import nvmeio
from nvmeio.profiles import Choice, new_profile, save_profile
from workloads.common import report


def default_handle_once(folder):
    """Change environment and profile before and after the handle is made."""
    os.environ |= {"NVMEIO_ENGINE": "sync", "XDG_CONFIG_HOME": folder}
    os.environ["NVMEIO_PROFILE"] = folder
    save(folder, block_size=8192)
    os.environ["NVMEIO_QUEUE_DEPTH"] = "3"
    nvmeio.write_file(b"bytes", f"{folder}/file")
    os.environ["NVMEIO_QUEUE_DEPTH"] = "4"
    save(folder, block_size=16384)
    handle = nvmeio.default_handle()
    nvmeio.read_file(f"{folder}/file")
    report(
        {
            "engine": handle.engine,
            "depth": handle.queue_depth,
            "block": handle.block_size,
            "another": nvmeio.Handle().block_size,
            "same": nvmeio.default_handle() is handle,
            "threads": handle.workers,
        }
    )


def save(folder, block_size):
    """Save a profile of the device that a folder is on."""
    options = {"engine": "auto", "bounce": "auto", "queue_depth": 9, "workers": 1}
    choice = Choice({**options, "block_size": block_size}, {})
    save_profile(new_profile(folder, both=choice, read=choice, write=choice))
