"""Record the transfers of nvmeio in every process with this folder on PYTHONPATH.

DeepSpeed's tools make their handles in children that a test cannot reach.  So each handle
appends how many bytes it has moved, by the library's own counts of what the engine has
done, to a file of its process after each wait.  The functions, whose handles no program can
reach, append the size of their buffers.
"""

import functools
import json
import os
from pathlib import Path

import nvmeio.deepspeed


def record(line):
    """Append a line."""
    path = Path(os.environ["NVMEIO_RECORDS"], str(os.getpid()))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def recording(kind):
    """Return a subclass of handles that record after each wait."""

    class Recording(kind):
        def wait(self, *args, **options):
            done = super().wait(*args, **options)
            stats = self.stats()
            ways = ("direct", "buffered", "bounced")
            record(
                {"handle": id(self), "bytes": sum(stats[f"bytes_{way}"] for way in ways)}
            )
            return done

    return Recording


def counting(transfer):
    """Return a function that records how many bytes it has transferred."""

    @functools.wraps(transfer)
    def called(buffer, *args):
        status = transfer(buffer, *args)
        record({"handle": None, "bytes": 0 if status else buffer.nbytes})
        return status

    return called


# What DeepSpeed gets, with either way to report errors.
for module in (nvmeio.deepspeed, nvmeio):
    module.aio_handle = recording(module.aio_handle)
    module.aio_read = counting(module.aio_read)
    module.aio_write = counting(module.aio_write)
