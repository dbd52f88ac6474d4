"""Let nvmeio follow the import of DeepSpeed, where NVMEIO_DEEPSPEED is set.

nvmeio-deepspeed.pth imports this while Python starts, and only with the variable set: so it
needs the standard library alone, and does without nvmeio, which loads numpy.
"""

import os
import sys

BUILDERS = "deepspeed.ops.op_builder"


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
            if spec is not None:
                follow(spec.loader)
                return spec
        return None


def follow(loader):
    """Let a loader install nvmeio once it has executed the op builders."""
    execute = loader.exec_module

    def exec_module(module):
        execute(module)
        # Some loaders serve more than one module.
        if module.__name__ == BUILDERS:
            from nvmeio.deepspeed.builders import install_for_environment

            install_for_environment()

    loader.exec_module = exec_module


if os.environ.get("NVMEIO_DEEPSPEED", "").lower() not in ("", "0", "false", "no", "off"):
    sys.meta_path.insert(0, Follower)
