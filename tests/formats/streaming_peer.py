"""streaming, imported without the packages of which it needs only a few names.

transformers and torchvision, with all that they bring, are the base classes of datasets
that no test uses.
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
    """A module of which every name is a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


_missing = [name for name in MODULES if name not in sys.modules]
sys.modules.update((name, Empty(name)) for name in _missing)
try:
    import streaming
finally:
    # Others find out by an import whether the real ones are installed.
    for name in _missing:
        del sys.modules[name]
