"""Options of torch.save, where a version of torch has them."""

import contextlib
from typing import Any

__all__ = ["saving_with"]


def saving_with(**options: Any) -> contextlib.AbstractContextManager[Any]:
    """Have torch.save take these of its options, where it has them."""
    try:
        from torch.utils.serialization import config

        for name in options:
            getattr(config.save, name)
        found: contextlib.AbstractContextManager[Any]
        found = config.patch({f"save.{name}": value for name, value in options.items()})
    except (ImportError, AttributeError):
        return contextlib.nullcontext()
    return found
