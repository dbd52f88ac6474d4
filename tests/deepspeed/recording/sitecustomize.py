"""Records what goes through nvmeio in every process that has this folder on PYTHONPATH.

The tools of DeepSpeed make their handles in children that a test cannot reach.  So each
handle of nvmeio writes its statistics to a file of its process whenever it has waited:
those are the library's own counts, of what the engine has done.
"""

import json
import os
from pathlib import Path

import nvmeio.deepspeed
import nvmeio.files


def record(handle, call):
    """Append the statistics of a handle."""
    line = {"process": os.getpid(), "handle": id(handle), "call": call, **handle.stats()}
    path = Path(os.environ["NVMEIO_RECORDS"], str(os.getpid()))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def recording(kind):
    """Make a class of handles that record when they have waited, or were a context."""

    class Recording(kind):
        def wait(self, *args, **options):
            done = super().wait(*args, **options)
            record(self, "wait")
            return done

        def __exit__(self, *error):
            super().__exit__(*error)
            record(self, "exit")

    return Recording


# The handles that DeepSpeed makes, by the contract and to raise, and those of functions.
for module in (nvmeio.deepspeed, nvmeio, nvmeio.files):
    module.aio_handle = recording(module.aio_handle)
