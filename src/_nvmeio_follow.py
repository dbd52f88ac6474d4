"""Install nvmeio in other packages as they are imported, where the environment says so.

nvmeio-follow.pth imports this module while Python starts, and only if NVMEIO_DEEPSPEED or
NVMEIO_SAFETENSORS is set.  It needs the standard library alone, because importing nvmeio
would load numpy in every process.
"""

import importlib
import os
import sys
import threading

# The modules whose execution installs nvmeio, and the variable that asks for it.  The
# package deepspeed is here because a DeepSpeed without builders must be refused.
PLACES = {
    "deepspeed": "NVMEIO_DEEPSPEED",
    "deepspeed.ops.op_builder": "NVMEIO_DEEPSPEED",
    "safetensors": "NVMEIO_SAFETENSORS",
    "safetensors.numpy": "NVMEIO_SAFETENSORS",
    "safetensors.torch": "NVMEIO_SAFETENSORS",
}
# What is imported then; the last one installs.
MODULES = {
    "NVMEIO_DEEPSPEED": ("nvmeio", "nvmeio.deepspeed", "nvmeio.deepspeed.builders"),
    "NVMEIO_SAFETENSORS": (
        "nvmeio",
        "nvmeio.safetensors",
        "nvmeio.safetensors._install",
    ),
}
OFF = ("", "0", "false", "no", "off")


class Follower:
    """Finds no module itself; makes the modules in PLACES install nvmeio when executed."""

    asking = threading.local()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Return the spec of a module whose execution installs nvmeio."""
        # Another finder may ask all others too, this one included.
        if name not in PLACES or getattr(cls.asking, "now", False):
            return None
        cls.asking.now = True
        try:
            return cls.ask_others(name, path, target)
        finally:
            cls.asking.now = False

    @classmethod
    def ask_others(cls, name, path, target):
        """Return the spec that another finder finds; its loader also installs nvmeio."""
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not cls else None
            if spec is not None:
                # A folder without __init__.py has no loader before Python 3.11.
                if spec.loader is not None:
                    follow(spec.loader)
                return spec
        return None


def follow(loader):
    """Let a loader install nvmeio once it has executed one of the places."""
    execute = loader.exec_module
    # Some loaders serve more than one module.
    if getattr(execute, "__module__", None) == __name__:
        return

    def exec_module(module):
        execute(module)
        variable = PLACES.get(module.__name__)
        if variable is not None and wanted(variable):
            install(variable, module)

    loader.exec_module = exec_module


def install(variable, module):
    """Install nvmeio; raise RuntimeError if it cannot be imported.

    An ImportError would look as if the package that imports ``module`` was missing.
    """
    try:
        # Packages before their parts.  Importing a part holds its lock while it waits for
        # the package, and another thread that imports the package may need the part.
        for name in MODULES[variable]:
            found = importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"{variable} is set, and nvmeio cannot be imported: {error}"
        ) from error
    if variable == "NVMEIO_DEEPSPEED":
        found.install_for_environment()
    else:
        found.follow_import(module)


def wanted(variable):
    """Return whether a variable is set; a program may change it while it runs."""
    return os.environ.get(variable, "").strip().lower() not in OFF


if any(map(wanted, PLACES.values())):
    sys.meta_path.insert(0, Follower)
