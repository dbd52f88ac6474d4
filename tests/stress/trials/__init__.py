"""What the children of the stress tests do; ``python -m trials NAME ARGUMENTS``."""
