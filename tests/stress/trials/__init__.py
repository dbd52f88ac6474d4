"""The children of the stress tests; ``python -m trials NAME ARGUMENTS``."""
