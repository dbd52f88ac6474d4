"""Import streaming without the packages that it needs only for a few names.

It takes the base classes of some datasets from transformers and torchvision; no test uses
these datasets.
"""

import sys
import types

__all__ = ["streaming"]

MODULES = [
    "transformers",
    "transformers.feature_extraction_utils",
    "transformers.models",
    "transformers.models.auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_base",
    "torchvision",
    "torchvision.datasets",
    "torchvision.transforms",
    "torchvision.transforms.functional",
]


class Empty(types.ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


_missing = [name for name in MODULES if name not in sys.modules]
sys.modules.update((name, Empty(name)) for name in _missing)
try:
    import streaming
finally:
    # Other packages import the real ones to see whether they are installed.
    for name in _missing:
        del sys.modules[name]
