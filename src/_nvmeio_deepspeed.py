"""Let nvmeio follow the import of DeepSpeed, where NVMEIO_DEEPSPEED is set.

nvmeio-deepspeed.pth imports this while Python starts, and only with the variable set: so it
needs the standard library alone, and does without nvmeio, which loads numpy.
"""

import os
import sys
import threading

# Whose execution installs nvmeio: the builders', or that of a DeepSpeed without them, which
# is refused.
PLACES = ("deepspeed.ops.op_builder", "deepspeed")
OFF = ("", "0", "false", "no", "off")


class Follower:
    """Finds no module itself; of two modules it has what the others found do more."""

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
        """Return what another finder finds, with a loader that does more."""
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
        if module.__name__ in PLACES and wanted():
            install()

    loader.exec_module = exec_module


def install():
    """Install nvmeio, whose absence must not look like that of DeepSpeed."""
    try:
        # First and alone: who imports a part of a package holds its lock while he waits for
        # the package, and another thread may be importing that.
        import nvmeio  # noqa: F401
        from nvmeio.deepspeed.builders import install_for_environment
    except ImportError as error:
        raise RuntimeError(
            f"NVMEIO_DEEPSPEED is set, and nvmeio cannot be imported: {error}"
        ) from error
    install_for_environment()


def wanted():
    """Tell whether the variable is set; a program may change it while it runs."""
    return os.environ.get("NVMEIO_DEEPSPEED", "").strip().lower() not in OFF


if wanted():
    sys.meta_path.insert(0, Follower)
