"""``python -m nvmeio``, the same as the command ``nvmeio``."""

import sys

from nvmeio._cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
