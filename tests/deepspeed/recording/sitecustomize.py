"""Record the transfers of nvmeio in every process with this folder on PYTHONPATH.

DeepSpeed's tools make their handles in children that a test cannot reach.  So each handle
appends its statistics to a file of its process after each wait.  They are the library's
own counts of what the engine has done.
"""

import json
import os
from pathlib import Path

import nvmeio.deepspeed
import nvmeio.files


def record(handle, call):
    """Append a handle's statistics."""
    line = {"process": os.getpid(), "handle": id(handle), "call": call, **handle.stats()}
    path = Path(os.environ["NVMEIO_RECORDS"], str(os.getpid()))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def recording(kind):
    """Return a subclass of handles that record after each wait and block."""

    class Recording(kind):
        def wait(self, *args, **options):
            done = super().wait(*args, **options)
            record(self, "wait")
            return done

        def __exit__(self, *error):
            super().__exit__(*error)
            record(self, "exit")

    return Recording


# Handles that DeepSpeed makes, with either way to report errors, and those of functions.
for module in (nvmeio.deepspeed, nvmeio, nvmeio.files):
    module.aio_handle = recording(module.aio_handle)
