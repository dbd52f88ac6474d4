"""Let nvmeio follow the import of DeepSpeed, where NVMEIO_DEEPSPEED is set.

nvmeio-deepspeed.pth imports this while Python starts, and only with the variable set: so it
needs the standard library alone, and does without nvmeio, which loads numpy.
"""

import os
import sys

BUILDERS = "deepspeed.ops.op_builder"
OFF = ("", "0", "false", "no", "off")


class Follower:
    """Finds no module itself; of one module it has what the others found do more."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Return the spec of DeepSpeed's op builders, whose execution installs nvmeio."""
        if name != BUILDERS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not cls else None
            if spec is not None and spec.loader is not None:
                follow(spec.loader)
                return spec
        return None


def follow(loader):
    """Let a loader install nvmeio once it has executed the op builders."""
    execute = loader.exec_module

    def exec_module(module):
        execute(module)
        # Some loaders serve more than one module.
        if module.__name__ == BUILDERS and wanted():
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
