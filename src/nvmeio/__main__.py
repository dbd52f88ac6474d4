"""``python -m nvmeio``, the same as ``nvmeio``."""

import sys

from nvmeio.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
