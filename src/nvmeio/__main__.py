"""``python -m nvmeio``, the same as ``nvmeio``.

Python imports the package before this module.  Until then Ctrl-C is a KeyboardInterrupt
with a traceback, as in any program; the script ``nvmeio`` needs no such moment.
"""

import sys

from _nvmeio_command import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
