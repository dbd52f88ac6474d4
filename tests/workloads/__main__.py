"""Call the workload that the command line names."""

import ctypes
import faulthandler
import importlib
import json
import re
import sys
from pathlib import Path

SUBJECTS = (
    *("activations", "callbacks", "checkpoints", "defaults", "devices", "exits", "faults"),
    *("forks", "futures", "loaders", "memory", "models", "optimizers", "signals"),
    "weights",
)


# Constants of linux/prctl.h.
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def let_strace_attach():
    """Allow any process to trace this one; by default Yama allows only ancestors."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)


def main(package, subjects):
    """Find the function in one of the package's modules, and call it."""
    faulthandler.enable()
    let_strace_attach()
    name, arguments = sys.argv[1:]
    # Import only the module with the function, because others may need too much memory.
    (folder,) = importlib.import_module(package).__path__
    (subject,) = [
        subject
        for subject in subjects
        if re.search(rf"^def {name}\(", Path(folder, f"{subject}.py").read_text(), re.M)
    ]
    module = importlib.import_module(f"{package}.{subject}")
    getattr(module, name)(**json.loads(arguments))


if __name__ == "__main__":
    main("workloads", SUBJECTS)
