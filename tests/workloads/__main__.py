"""Calls the workload that the command line names."""

import faulthandler
import importlib
import json
import sys

SUBJECTS = ("faults", "signals", "forks", "exits", "memory", "loaders", "futures")


def main(package, subjects):
    """Find the function in one of the package's modules, and call it."""
    faulthandler.enable()
    name, arguments = sys.argv[1:]
    modules = [importlib.import_module(f"{package}.{subject}") for subject in subjects]
    (function,) = [
        module.__dict__[name]
        for module in modules
        if getattr(module.__dict__.get(name), "__module__", None) == module.__name__
    ]
    function(**json.loads(arguments))


if __name__ == "__main__":
    main("workloads", SUBJECTS)
