"""The children of the stress tests; ``python -m cases NAME ARGUMENTS``."""
