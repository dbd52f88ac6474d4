"""Set options of torch.save, in versions of torch that have them."""

import contextlib
from typing import Any

__all__ = ["saving_with"]


def saving_with(**options: Any) -> contextlib.AbstractContextManager[Any]:
    """Set options of torch.save for a while; do nothing if this version lacks one."""
    try:
        from torch.utils.serialization import config

        for name in options:
            getattr(config.save, name)
        found: contextlib.AbstractContextManager[Any]
        found = config.patch({f"save.{name}": value for name, value in options.items()})
    except (ImportError, AttributeError):
        return contextlib.nullcontext()
    return found
